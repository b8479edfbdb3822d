"""Files with a JSON object a line, each about a step, that a run which goes on continues."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roundpipe import _core


class Lines:
    """Appends lines, see `StepLines` of the engine.

    Args:
        path: the file.
        after_step: the step that training goes on from; 0 for a new run.

    Raises:
        RoundPipeError: the file cannot be written.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self._lines = _core.StepLines(str(path), after_step, lambda text: print(text, file=sys.stderr))

    def add(self, line: str) -> None:
        """Appends a line: a JSON object with a `step`."""
        self._lines.add(line)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All that the file has, or will have once it can be written."""
        return [json.loads(line) for line in self._lines.lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a last one that is torn; empty if there is no file."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
