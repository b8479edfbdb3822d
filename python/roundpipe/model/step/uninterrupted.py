"""Short blocks that signals must not stop half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

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
