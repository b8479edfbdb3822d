"""An output on which a signal arrives when a text is written."""

from __future__ import annotations

import io
import signal


class InterruptedAt(io.StringIO):
    """Raises the signal before it writes the text; by default, as Ctrl+C does."""

    def __init__(self, text: str, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self._text, self._number = text, number

    def write(self, text: str) -> int:
        if self._text in text:
            signal.raise_signal(self._number)
        return super().write(text)
