"""The nodes that train a model together, as they save and load one checkpoint together."""

from __future__ import annotations

import weakref
from datetime import timedelta

from roundpipe.distributed.nodes import Nodes
from roundpipe.distributed.ranks import Ranks, values_over
from roundpipe.model.facade import ModelFacade

# How long a rank may write or read while the others wait for it. One that has ended is noticed at once.
_LONGEST_PART = timedelta(hours=2)


def ranks_of_call(model: ModelFacade, kind: str) -> Ranks:
    """The ranks of a model, as they make one call on their calling threads.

    Args:
        model: the model.
        kind: what this rank is doing, such as "saves".
    """
    nodes = model._step_group.nodes
    if nodes is None:
        return Ranks.alone()
    return Ranks(nodes.rank, nodes.size, lambda mine: nodes.gather(kind, mine))


class _RanksOfSaves(Ranks):
    """Used by a model, and by a save that outlives it; after both, a later model uses what their messages go over."""

    def __init__(self, nodes: Nodes) -> None:
        control = nodes.control_for(self, _LONGEST_PART)
        super().__init__(control.rank, control.size, values_over(control))


# One for each model that was saved.
_ranks: weakref.WeakKeyDictionary[Nodes, Ranks] = weakref.WeakKeyDictionary()


def ranks_of_saves(model: ModelFacade) -> Ranks:
    """The ranks of a model, for the threads of its saves, of which one runs at a time. The first call is collective."""
    nodes = model._step_group.nodes
    if nodes is None:
        return Ranks.alone()
    if nodes not in _ranks:
        _ranks[nodes] = _RanksOfSaves(nodes)
    return _ranks[nodes]
