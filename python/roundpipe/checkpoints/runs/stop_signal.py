"""Ctrl+C and SIGTERM as a request to stop after the present step, so that a run can save before it ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopSignal:
    """Notes SIGTERM (a machine that is taken away) and SIGINT (Ctrl+C) while its block runs.

        with StopSignal() as stop:
            for batch in batches:
                train(batch)
                if stop.requested:
                    roundpipe.save_checkpoint(folder, model, optimizer, wait=True)
                    break

    A second Ctrl+C raises KeyboardInterrupt at once. Outside the main thread, the block notes nothing.

    Attributes:
        requested: whether a signal has come.
        number: the signal that came first.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.number = number
        self.requested = True
