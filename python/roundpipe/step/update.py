"""The optimizer thread and its work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, ClassVar

from roundpipe import _core

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundpipe-optimizer")


_Handler = Callable[[int, FrameType | None], Any]
# Signals whose handlers are written by programs: such a handler may raise between any two statements.
_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF")
    if hasattr(signal, name)
]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpones Ctrl+C and the handlers of other signals until the block ends. For short blocks that must not stop
    half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, _Handler] = {}
    arrived: dict[int, FrameType | None] = {}
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, arrived.setdefault)
        yield
    finally:
        _restore(handlers)
        with ExitStack() as stack:  # calls all handlers, even if one raises
            for number, frame in arrived.items():
                stack.callback(handlers[number], number, frame)


def _restore(handlers: dict[int, _Handler]) -> None:
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    except BaseException:
        # One restored handler has raised; the others must be restored as well.
        _restore(handlers)
        raise


class _Here(threading.local):
    updates = False


_here = _Here()


def is_updating() -> bool:
    """Whether this thread is making an update."""
    return _here.updates


class Update:
    """One update on the optimizer thread. REQUIRES: made while signals are postponed. A thread pool that is interrupted
    while it starts its thread would wait for it forever when the process ends.

    Replaces a Future, whose lock stays locked if Ctrl+C arrives at the wrong statement of a wait.

    Args:
        work: returns whether an update was made.
    """

    _newest_over: ClassVar[_core.Event | None] = None  # of all models

    def __init__(self, work: Callable[[], bool]) -> None:
        self._over = _core.Event()
        self._made = False
        self._error: BaseException | None = None
        Update._newest_over = self._over
        try:
            _thread.submit(self._run, work)
        except RuntimeError:
            # In an exit handler, where Python no longer starts threads.
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
        """Waits until the update has finished."""
        self._over.wait()

    @staticmethod
    def wait_all() -> None:
        """Waits until every update of any model has finished. Not from a step function, which would wait for itself."""
        if not is_updating() and Update._newest_over is not None:
            Update._newest_over.wait()

    def result(self) -> bool:
        """Whether an update was made; raises whatever the update raised. REQUIRES: the update has finished."""
        if self._error is not None:
            raise self._error
        return self._made


def after_steps(work: Callable[[], bool]) -> Update:
    """Runs `work` on the optimizer thread, after the queued steps."""
    with uninterrupted():
        return Update(work)
