"""Packages that only some data needs."""

from __future__ import annotations

import importlib
from typing import Any


def imported(module: str, why: str) -> Any:
    """A module of the extra `data`.

    Raises:
        ValueError: it is not installed; the text says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"[data] {package} cannot be imported ({error}), expected it {why}; install it: "
            "pip install 'roundpipe-engine[data]'"
        ) from None
