"""What is wrong with records that cannot be used."""

from __future__ import annotations

from typing import Literal


class UnusableError(ValueError):
    """A record that cannot be used. Its text says what is wrong with it, and what was expected.

    Attributes:
        kind: "broken", or "empty" if there is nothing to learn from.
        reason: the same for all records with this mistake.
    """

    def __init__(self, kind: Literal["broken", "empty"], reason: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.reason = kind, reason
