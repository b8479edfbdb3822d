"""Confirms how a batch with pictures is cut: rows alone call the first layer as they do beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.placeholder import WITHOUT_VALUES
from roundpipe.following.program import Ref
from roundpipe.following.survey import evaluating
from roundpipe.following.verification import place_of_before, state_before_layers

# A row that gets another row's picture differs by much more, and weights may be updated meanwhile.
_CLOSE = 0.1


def other_alone(
    model: nn.Module, chain: Iterable[nn.Module], together: Mapping[str, Any], alone: list[tuple[int, dict[str, Any]]]
) -> str | None:
    """The first argument of the first layer that a row has otherwise alone; None if there is none, or if the rows
    cannot be run like this.

    Args:
        model: the followed one.
        chain: its parts.
        together: arguments of the model for some of the batch's rows, the first ones.
        alone: those for single rows, each with the row's place.
    """
    try:
        with evaluating(model), torch.random.fork_rng(devices=[]):
            parts = list(chain)
            parts = [ShadowTree(part, {}).root for part in parts[: place_of_before(parts) + 1]]
            whole = _first_call(parts, together)
            each = [(row, arguments, _first_call(parts, arguments)) for row, arguments in alone]
    except (*WITHOUT_VALUES, AttributeError, ValueError):
        return None  # a run that fails says so itself
    rows = len(together["input_ids"])
    for row, arguments, mine in each:
        attended = arguments.get("attention_mask")
        for path in whole.keys() & mine.keys():
            if _differs(whole[path], mine[path], rows, row, attended):
                return path
    return None


def _first_call(parts: Sequence[nn.Module], arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the first layer is called with, by their places."""
    program, values, *_ = state_before_layers(parts, (), arguments)
    tree = program.calls[0].arguments
    named = pytree.tree_flatten_with_path(pytree.tree_unflatten(tree.leaves, tree.spec))[0]
    return {
        pytree.keystr(path): values[leaf.number]
        for path, leaf in named
        if isinstance(leaf, Ref) and leaf.number in values
    }


def _differs(whole: torch.Tensor, alone: torch.Tensor, rows: int, row: int, attended: torch.Tensor | None) -> bool:
    """Whether a row's part of a tensor for all rows is not the row's own, where it is attended to."""
    dim = next((dim for dim in (0, 1) if dim < whole.dim() and whole.shape[dim] == rows), None)
    if dim is None or alone.dim() != whole.dim():
        return False
    mine = whole.narrow(dim, row, 1)
    if mine.shape != alone.shape:
        return False
    if isinstance(attended, torch.Tensor) and attended.dim() > 1:
        tokens = next((d for d in range(dim + 1, mine.dim()) if mine.shape[d] == attended.shape[1]), None)
        if tokens is not None:
            used = attended[0].nonzero()[:, 0]
            mine, alone = mine.index_select(tokens, used), alone.index_select(tokens, used)
    if not mine.is_floating_point():
        return not torch.equal(mine, alone)
    mine, alone = (value.float().nan_to_num(neginf=0.0, posinf=0.0) for value in (mine, alone))
    scale = float(mine.abs().max()) if mine.numel() else 0.0
    return scale > 0 and float((mine - alone).abs().max()) > _CLOSE * scale
