"""The threads that update parameters on the host."""

from __future__ import annotations

from roundpipe import _core


def set_threads(threads: int, *, pinned: bool = False) -> None:
    """Sets how many threads compute updates from now on, in all optimizers of this process.

    The default is the number of physical cores, less one for each worker, but at least half of the cores and at most 16
    for each memory node. The environment variables ROUNDPIPE_OPTIM_THREADS and ROUNDPIPE_OPTIM_PIN (1) override it.

    Args:
        threads: at least 1; the thread that asks for an update counts.
        pinned: bind each started thread to a core of its own, from the last core downwards, so that the first cores
            are left to the device workers.

    Raises:
        ValueError: less than one thread.
    """
    _core.set_threads(threads, pinned)
