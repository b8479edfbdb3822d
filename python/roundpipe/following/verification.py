"""Verifies that a followed model computes the plain model's results, and finds how its rows and its loss depend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.loss_trial import rows_of_part, try_losses
from roundpipe.following.parts import Before, RecordingRun, buffers_around
from roundpipe.following.placeholder import CannotFollow
from roundpipe.following.skeleton import FollowedModel, Over, Skeleton
from roundpipe.following.survey import evaluating
from roundpipe.model.losses.reduction import FoundLoss, LossForm


@dataclasses.dataclass(frozen=True)
class Found:
    """The findings of the verification.

    Attributes:
        mixing: the reason why a row's outputs depend on other rows; None if they do not.
        losses: what is known about the losses of calls, by their form.
    """

    mixing: str | None
    losses: dict[LossForm, FoundLoss]


def verify(followed: FollowedModel, chain: nn.Sequential, batch: dict[str, Any], expected: Any) -> Found:
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
        if not same_outputs(outputs, expected):
            raise CannotFollow("part by part it does not compute the same as whole: its layers share something")
        rows = max(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor))
        cut = rows - 1
        piece = {name: rows_of_part(value, rows, slice(cut)) for name, value in batch.items()}
        halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in followed.model.parameters())
        found = mixing(outputs, parts[-1](state_of(piece)), rows, cut, 0.1 if halves else 1e-3)
        if found is None and halves and _routes(followed.model):
            found = _mixing_gradient(parts, batch, rows)
    return Found(found, try_losses(followed, parts[-1], state, batch))


def same_outputs(outputs: Any, expected: Any) -> bool:
    """Whether two outputs of a model have the same values."""
    mine, theirs = pytree.tree_leaves(outputs), pytree.tree_leaves(expected)
    return len(mine) == len(theirs) and all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def state_before_layers(parts: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the first of the model's own layers gets in a call of a chain of parts."""
    state: Any = parts[0](*args, **kwargs)
    for part in parts[1 : place_of_before(parts) + 1]:
        state = part(state)
    return state


def place_of_before(parts: Iterable[nn.Module]) -> int:
    """The place of the part before the model's own layers; towers may come first."""
    return next(place for place, part in enumerate(parts) if isinstance(part, Before))


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
    program, values, *others = state_before_layers(parts, (), batch)
    leaves = {
        number: value.detach().requires_grad_()
        for number, value in values.items()
        if value.is_floating_point() and value.dim() > 1 and value.shape[0] == rows
    }
    try:
        with torch.enable_grad():
            state: Any = (program, {**values, **leaves}, *others)
            for part in parts[place_of_before(parts) + 1 : -1]:
                state = part(state)
            last = program.calls[-1].outputs
            ends = [state[1][number] for number in last if number is not None]
            total = sum(end[0].float().sum() for end in ends if end.requires_grad and end.shape[0] == rows)
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except (RuntimeError, TypeError):
        return None  # not every layer can be differentiated on the host
    mixed = any(gradient is not None and bool(gradient[1:].any()) for gradient in found)
    return "what its layers return for a row changes with the batch's other rows" if mixed else None


def mixing(whole: Any, part: Any, rows: int, part_rows: int, exactness: float) -> str | None:
    """Returns a sign that a row's outputs depend on other rows; None if there is none.

    Args:
        whole: outputs of a batch.
        part: outputs of its first rows alone.
        rows: number of rows of the batch.
        part_rows: number of rows of the part.
        exactness: largest difference that rounding makes, relative to the largest value.
    """
    named = pytree.tree_flatten_with_path(whole)[0]
    others = pytree.tree_leaves(part)
    if len(named) != len(others):
        return "its outputs have another structure"
    for (path, mine), theirs in zip(named, others, strict=True):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor) or mine.dim() == 0:
            continue
        place = pytree.keystr(path)
        if mine.shape[0] % rows:
            if mine.shape == theirs.shape and torch.equal(mine, theirs):
                continue  # it belongs to the model, not to the batch
            return f"output{place} {tuple(mine.shape)} has no dimension of rows"
        expected = mine[: mine.shape[0] // rows * part_rows]
        if expected.shape != theirs.shape:
            return f"output{place} of {part_rows} rows alone is {tuple(theirs.shape)}, not {tuple(expected.shape)}"
        scale = float(mine.float().nan_to_num(posinf=0, neginf=0).abs().max()) if mine.numel() else 0.0
        if mine.is_floating_point() and not torch.allclose(
            expected.float(), theirs.float(), rtol=0, atol=exactness * max(scale, 1e-6), equal_nan=True
        ):
            return f"output{place} of a row changes with the batch's other rows"
    return None
