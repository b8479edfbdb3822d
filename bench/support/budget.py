"""A time budget in parts: a part may use its share and what those before it have left over."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Deadline:
    """A moment that work has to be done by."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 when it is over."""
        return max(0.0, self._at_s - time.monotonic())

    def share(self, parts: float) -> Deadline:
        """The end of the first of `parts` equal parts of what is left."""
        return Deadline(time.monotonic() + self.left_s / parts)


class Budget:
    """`total_s` seconds from now, divided among parts that run one after the other."""

    def __init__(self, total_s: float, shares: Mapping[str, float]) -> None:
        self._ends: dict[str, Deadline] = {}
        start_s, reached = time.monotonic(), 0.0
        for part, share in shares.items():
            reached += share
            self._ends[part] = Deadline(start_s + total_s * reached / sum(shares.values()))

    def __getitem__(self, part: str) -> Deadline:
        return self._ends[part]
