"""The optimizer thread, and what runs on it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from roundpipe import _core

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundpipe-optimizer")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off Ctrl+C until the block is over. For short blocks that must not stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


class _Here(threading.local):
    updates = False


_here = _Here()


def is_updating() -> bool:
    """Whether this thread is making an update."""
    return _here.updates


class Update:
    """One update, on the optimizer thread. REQUIRES: made where Ctrl+C is put off.

    In place of a Future, whose lock stays locked when Ctrl+C arrives at the wrong statement of a wait.

    Args:
        work: returns whether an update was made.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._over = _core.Event()
        self._made = False
        self._error: BaseException | None = None
        try:
            _thread.submit(self._run, work)
        except RuntimeError:
            # In an exit handler, when Python starts threads no more.
            self._run(work)

    def _run(self, work: Callable[[], bool]) -> None:
        try:
            _here.updates = True
            self._made = work()
        except BaseException as error:
            self._error = error
        finally:
            _here.updates = False
            self._over.fire()

    def wait(self) -> None:
        """Waits until it is over."""
        self._over.wait()

    def result(self) -> bool:
        """Whether an update was made, or raises what the update raised. REQUIRES: it is over."""
        if self._error is not None:
            raise self._error
        return self._made


def after_steps(work: Callable[[], bool]) -> Update:
    """Does `work` on the optimizer thread, after the steps that are queued."""
    with uninterrupted():
        return Update(work)
