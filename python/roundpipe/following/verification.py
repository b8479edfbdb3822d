"""Verifies that a followed model computes the plain model's results, and finds how its loss and its rows depend."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from roundpipe.data.samples import IGNORED
from roundpipe.following.parts import FollowedModel, Over, RecordingRun, Skeleton, buffers_around
from roundpipe.following.placeholder import CannotFollow
from roundpipe.following.program import Tree
from roundpipe.following.reduction import Reduction, asks_for_loss, find_reduction, mixing, weights
from roundpipe.following.survey import evaluating
from roundpipe.following.token_loss import loss_in
from roundpipe.layers.shadow import ShadowTree


@dataclasses.dataclass(frozen=True)
class Found:
    """The findings of the verification.

    Attributes:
        reduction: what the loss averages over; None if it is unknown, or no loss was seen.
        mixing: the reason why a row's outputs depend on other rows; None if they do not.
        adds_up: whether, given `num_items_in_batch`, losses are sums divided by it.
    """

    reduction: Reduction | None
    mixing: str | None = None
    adds_up: bool = False


def verify(
    followed: FollowedModel, chain: nn.Sequential, batch: dict[str, Any], expected: Any, is_causal: bool
) -> Found:
    """Runs the chain on the host, as a device would, and compares every output with the plain model's, bit for bit."""
    with evaluating(followed.model):
        # Separate trees, as on devices: only values that are passed on reach another part.
        parts = [ShadowTree(part, {}).root for part in chain]

        def state_of(inputs: dict[str, Any]) -> Any:
            state: Any = parts[0](**inputs)
            for part in parts[1:-1]:
                state = part(state)
            return state

        state = state_of(batch)
        outputs = parts[-1](state)
        mine, theirs = pytree.tree_leaves(outputs), pytree.tree_leaves(expected)
        same = len(mine) == len(theirs) and all(
            torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(mine, theirs, strict=True)
        )
        if not same:
            raise CannotFollow("part by part it does not compute the same as whole: its layers share something")
        rows = max(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor))
        cut = rows - 1
        pieces = [{n: _rows_of(v, rows, part) for n, v in batch.items()} for part in (slice(cut), slice(cut, rows))]
        halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in followed.model.parameters())
        found = mixing(outputs, parts[-1](state_of(pieces[0])), rows, cut, 0.1 if halves else 1e-3)
        if found is None and halves and _routes(followed.model):
            found = _mixing_gradient(parts, batch, rows)
        if is_causal:
            program, values, *_ = state
            labels = program.inputs.join(values, {})[1]["labels"]
            labels[:, 0] = IGNORED
            again, loss = parts[-1](state).loss, expected.loss
            shifts = torch.allclose(again, loss, rtol=0, atol=0, equal_nan=True)
            return Found(Reduction.LABELS_BUT_FIRST if shifts else Reduction.LABELS, found, adds_up=True)
        if found is not None:
            return Found(None, found)
        states = [_part_of(state, rows, part) for part in (slice(cut), slice(cut, rows))]

        def losses(changed: dict[str, Any]) -> tuple[Any, list[Any]]:
            whole = {n: torch.cat(v) if isinstance(v, list) else v for n, v in changed.items()}
            each = [{n: v[i] if isinstance(v, list) else v for n, v in changed.items()} for i in range(len(states))]
            return (
                loss_in(parts[-1](_called_with(state, whole))),
                [loss_in(parts[-1](_called_with(s, c))) for s, c in zip(states, each, strict=True)],
            )

        if not asks_for_loss(batch):
            return Found(None)
        # All of these start from the same hidden states, so that only the end rounds.
        exactness = 2e-3 if halves else 1e-5
        with _LossesInFloat():
            reduction = find_reduction(losses, pieces, exactness)
        return Found(reduction, adds_up=reduction is not None and _adds_up(followed, losses, exactness))


class _LossesInFloat(TorchFunctionMode):
    """Computes losses of 16-bit numbers in fp32: rounded to 8 bits, a mean over labels looks like one over rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "loss" in func.__name__ or "entropy" in func.__name__:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _in_float, (args, kwargs))
        return func(*args, **kwargs)


def _in_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def try_training(followed: FollowedModel, batch: dict[str, Any]) -> None:
    """Raises CannotFollow if the code between the layers can only be followed in evaluation mode."""
    buffers = {name: buffer.clone() for name, buffer in buffers_around(followed).items()}
    with evaluating(followed.model), torch.random.fork_rng(devices=[]):
        followed.model.train()
        with contextlib.suppress(Over):
            Skeleton(followed, buffers).run(RecordingRun(followed, stops=True), (), batch)


def _routes(model: nn.Module) -> bool:
    return any(
        part in type(module).__name__.lower() for module in model.modules() for part in ("moe", "expert", "rout")
    )


def _mixing_gradient(parts: list[nn.Module], batch: dict[str, Any], rows: int) -> str | None:
    """Returns a sign that the first row's outputs depend on other rows, however little: their gradient.

    A router that mixes rows may change outputs so little that 16-bit numbers hide it.
    """
    program, values, *others = parts[0](**batch)
    leaves = {
        number: value.detach().requires_grad_()
        for number, value in values.items()
        if value.is_floating_point() and value.dim() > 1 and value.shape[0] == rows
    }
    try:
        with torch.enable_grad():
            state: Any = (program, {**values, **leaves}, *others)
            for part in parts[1:-1]:
                state = part(state)
            last = program.calls[-1].outputs
            ends = [state[1][number] for number in last if number is not None]
            total = sum(end[0].float().sum() for end in ends if end.requires_grad and end.shape[0] == rows)
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except (RuntimeError, TypeError):
        return None  # not every layer can be differentiated on the host
    mixed = any(gradient is not None and bool(gradient[1:].any()) for gradient in found)
    return "what its layers return for a row changes with the batch's other rows" if mixed else None


def _adds_up(
    followed: FollowedModel, losses: Callable[[dict[str, Any]], tuple[Any, list[Any]]], exactness: float
) -> bool:
    parameters = inspect.signature(followed.model.forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters):
        return False
    try:
        (whole, each), (twice, _) = (losses({"num_items_in_batch": torch.tensor(number)}) for number in (8, 16))
    except (RuntimeError, TypeError, ValueError):
        return False
    scale = exactness * max(1.0, abs(float(whole)))
    parts = weights(Reduction.SUM, [1] * len(each))
    total = sum(float(loss) * weight for loss, weight in zip(each, parts, strict=True))
    return abs(total - float(whole)) <= scale and abs(2 * float(twice) - float(whole)) <= scale


def _rows_of(value: Any, rows: int, part: slice) -> Any:
    return value[part] if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows else value


def _part_of(state: Any, rows: int, part: slice) -> Any:
    """Some rows of the values that reach the end of the forward."""
    program, values, *others = state

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape[0] % rows:
            return value
        return value.reshape(rows, -1, *value.shape[1:])[part].flatten(0, 1)

    return (program, {number: cut(value) for number, value in values.items()}, *others)


def _called_with(state: Any, changed: dict[str, Any]) -> Any:
    """The state after a call, as if some of its arguments had been different."""
    program, values, *others = state
    args, kwargs = program.inputs.join(values, {})
    inputs = Tree(*pytree.tree_flatten((args, {**kwargs, **changed})))
    return (dataclasses.replace(program, inputs=inputs), values, *others)
