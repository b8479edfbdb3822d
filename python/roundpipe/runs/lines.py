"""Files with a JSON object a line, each about a step, that a run which goes on continues."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from roundpipe.files import write_text


class Lines:
    """Appends lines, each flushed at once. Lines of steps behind `after_step` are removed first: those steps are done
    again. Training goes on while lines cannot be written, for example on a full disk: they are written later.

    Args:
        path: the file.
        after_step: the step that training goes on from; 0 for a new run.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self._path = path
        self.lines = [line for line in read_lines(path) if line["step"] <= after_step] if after_step else []
        write_text(path, "".join(json_line(line) for line in self.lines))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._complained = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a line."""
        line = {"step": step, **values}
        self.lines.append(line)
        self._unwritten += json_line(line).encode()
        try:
            written = self._file.write(self._unwritten) or 0
        except OSError as error:
            if not self._complained:
                print(
                    f"[train] cannot write {self._path}: {error.strerror}; training goes on, and its lines are written "
                    "when there is room",
                    file=sys.stderr,
                )
            self._complained = True
        else:
            self._unwritten = self._unwritten[written:]

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


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


def json_line(values: Mapping[str, Any]) -> str:
    """The values as a line of JSON, which has no NaN and no infinity: such values become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
