"""Kernels whose bits do not depend on the order in which a card's threads finish."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(is_needed: bool) -> Iterator[None]:
    """While it is open, torch picks deterministic kernels where it has them; for cards only."""
    if not is_needed:
        yield
        return
    # Read by cuBLAS when it starts; a value of the user's own stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was, warned_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic  # whose types do not name its one attribute
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled
