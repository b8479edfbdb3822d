"""What other systems compile when they are first used, kept for the next run."""

from __future__ import annotations

import os
from pathlib import Path

EXTENSIONS = Path(__file__).parents[2] / "build" / "torch_extensions"


def environment() -> dict[str, str]:
    """This one, in which they find what they have compiled."""
    there = {
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "TRAINSTREAM_CACHE_DIR": str(EXTENSIONS / "trainstream"),
        "TORCHINDUCTOR_CACHE_DIR": str(EXTENSIONS / "inductor"),
        "TRITON_CACHE_DIR": str(EXTENSIONS / "triton"),
    }
    return there | os.environ


def remove_stale_locks() -> None:
    """A process that was stopped while it compiled has left a lock, for which the next one would wait for ever."""
    for lock in EXTENSIONS.glob("**/lock"):
        lock.unlink(missing_ok=True)
