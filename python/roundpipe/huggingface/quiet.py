"""transformers without its progress bars, where a command has its own way to show progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Bars are off while the block runs."""
    from transformers.utils import logging as made

    logging: Any = made

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
