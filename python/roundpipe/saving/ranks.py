"""The nodes that train a model together, as they save and load one checkpoint together."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from roundpipe import _core
from roundpipe.distributed.control import Control
from roundpipe.distributed.nodes import Nodes
from roundpipe.model.facade import ModelFacade

T = TypeVar("T")

# How long a rank may write or read while the others wait for it. One that has ended is noticed at once.
_LONGEST_PART = timedelta(hours=2)


class Ranks:
    """The nodes of a model, or one process that trains alone. They work in parts that succeed on all, or fail on all.

    One thread at a time; each rank does the same parts.

    Args:
        nodes: the model's; None for a process that trains alone.
        exchange: returns the messages of all ranks, given this one's.

    Attributes:
        rank: this process's number.
        size: how many there are.
    """

    def __init__(self, nodes: Nodes | None, exchange: Callable[[Any], list[Any]]) -> None:
        self._exchange = exchange
        self.rank: int = 0 if nodes is None else nodes.rank
        self.size: int = 1 if nodes is None else nodes.size

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank, and returns what it has returned on each; values of JSON if there are several.

        Raises:
            ValueError: on every rank, if the first rank that fails has raised one.
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
            text = str(raised) if str(raised).startswith("[") else f"[checkpoint] {type(raised).__name__}: {raised}"
            mine = {"error": text, "is_callers": isinstance(raised, ValueError)}
        try:
            told = self._exchange(mine)
        except Exception as lost:
            raise lost if error is None else error from lost
        for rank, each in enumerate(told):
            if "error" not in each:
                continue
            if rank == self.rank and error is not None:
                raise error
            kind = ValueError if each["is_callers"] else _core.RoundPipeError
            raise kind(f"{each['error']} (on rank {rank})") from error
        return [each["value"] for each in told]


def ranks_of_call(model: ModelFacade, kind: str) -> Ranks:
    """The ranks of a model, as they make one call on their calling threads.

    Args:
        model: the model.
        kind: what this rank is doing, such as "saves".
    """
    nodes = model._step_group.nodes
    if nodes is None:
        return Ranks(None, lambda mine: [mine])
    return Ranks(nodes, lambda mine: [each["part"] for each in nodes.gather(kind, {"part": mine})])


# One for each model that was saved, for its saves' threads.
_controls: weakref.WeakKeyDictionary[Nodes, Control] = weakref.WeakKeyDictionary()


def ranks_of_saves(model: ModelFacade) -> Ranks:
    """The ranks of a model, for the threads of its saves, of which one runs at a time. The first call is collective."""
    nodes = model._step_group.nodes
    if nodes is None:
        return Ranks(None, lambda mine: [mine])
    control = _controls.get(nodes)
    if control is None:
        control = _controls[nodes] = nodes.new_control(_LONGEST_PART)
    return Ranks(nodes, lambda mine: [json.loads(each) for each in control.exchange(json.dumps(mine).encode())])
