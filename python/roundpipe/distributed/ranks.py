"""Ranks, or one process, that work in parts: each part succeeds on all of them, or fails on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self, TypeVar

from roundpipe import _core

T = TypeVar("T")

# Kinds of errors that are the same on every rank.
_KINDS: dict[str, type[Exception]] = {"value": ValueError, "damage": _core.DamagedCheckpointError}


class Ranks:
    """Ranks that work in parts, or one process that works alone. One thread at a time; each rank does the same parts.

    Args:
        rank: this process's number.
        size: how many there are.
        exchange: returns the messages of all ranks, values of JSON, given this one's; unused where there is one.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange

    @classmethod
    def alone(cls) -> Self:
        """One process."""
        return cls(0, 1, lambda mine: [mine])

    @classmethod
    def over(cls, control: _core.Control) -> Self:
        """Those of a control, which nothing else uses."""
        return cls(control.rank, control.size, values_over(control))

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank, and returns what it has returned on each; values of JSON if there are several.

        Raises:
            ValueError: on every rank, if the first rank that fails has raised one.
            DamagedCheckpointError: the same.
            RoundPipeError: on every rank, if it has raised something else, or if a rank does not answer.
        """
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        mine: dict[str, Any]
        try:
            mine = {"value": work()}
        except BaseException as raised:
            error = raised
            text = str(raised) if str(raised).startswith("[") else f"[distributed] {type(raised).__name__}: {raised}"
            mine = {
                "error": text,
                "kind": next((name for name, kind in _KINDS.items() if isinstance(raised, kind)), ""),
            }
        try:
            told = self._exchange(mine)
        except Exception as lost:
            raise lost if error is None else error from lost
        for rank, each in enumerate(told):
            if "error" not in each:
                continue
            if rank == self.rank and error is not None:
                raise error
            raise _KINDS.get(each["kind"], _core.RoundPipeError)(f"{each['error']} (on rank {rank})") from error
        return [each["value"] for each in told]


def values_over(control: _core.Control) -> Callable[[Any], list[Any]]:
    """Exchanges values of JSON instead of bytes."""
    return lambda mine: [json.loads(each) for each in control.exchange(json.dumps(mine).encode())]
