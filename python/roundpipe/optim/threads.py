"""The threads that update parameters on the host."""

from __future__ import annotations

from roundpipe import _core


def set_threads(threads: int, *, pinned: bool = False) -> None:
    """How many threads compute updates from now on, in all optimizers of this process.

    By default as many as there are physical cores, less one for each worker, but at least half of them and at most 16
    for each memory node. The environment variables ROUNDPIPE_OPTIM_THREADS and ROUNDPIPE_OPTIM_PIN (1) say otherwise.

    Args:
        threads: at least 1; the one that asks for an update counts.
        pinned: keep each started thread on a core of its own, from the last core downwards, so that the first ones are
            left to the device workers.

    Raises:
        ValueError: less than one thread.
    """
    _core.set_threads(threads, pinned)
