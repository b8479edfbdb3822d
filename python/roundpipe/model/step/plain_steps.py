"""Optimizers that step outside `model.step`, as in a plain PyTorch loop.

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

works with any torch optimizer over `model.optim_parameters()` or `model.parameters()`, and with a `roundpipe.optim`
optimizer made for the model. Such a step waits for the backward, and the next call reads its weights. torch's hooks
report every step of every optimizer; optimizers of other models are ignored.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from roundpipe.model.step.optimizer_context import in_optimizer_context
from roundpipe.model.step.optimizer_parameter import CopyOwner, OptimizerParameter, ParameterOwner

owners: weakref.WeakSet[ParameterOwner] = weakref.WeakSet()
"""All groups of models that are stepped together."""


def watch_optimizers() -> None:
    """Watches every step of a torch optimizer from now on."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if in_optimizer_context():
            _refuse_own_parameters(optimizer)
            _refuse_without_gradients(optimizer)
            return
        for group in stepped_groups(optimizer):
            group.begin_plain_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if in_optimizer_context():
            return
        for group in stepped_groups(optimizer):
            group.finish_plain_step(optimizer)

    torch_optimizer.register_optimizer_step_pre_hook(before)
    torch_optimizer.register_optimizer_step_post_hook(after)


def stepped_groups(optimizer: torch.optim.Optimizer) -> list[ParameterOwner]:
    """The groups of models that own parameters of the optimizer."""
    own, found = split_parameters(optimizer)
    return [group for group in list(owners) if any(group is known for known in found) or group.models.owns_any(own)]


def split_parameters(optimizer: torch.optim.Optimizer) -> tuple[set[int], list[CopyOwner]]:
    """Ids of the optimizer's parameters that are not copies, and the groups that own its other parameters."""
    own: set[int] = set()
    found: list[CopyOwner] = []
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            group = parameter.group() if isinstance(parameter, OptimizerParameter) else None
            if group is None:
                own.add(id(parameter))
            elif not any(group is known for known in found):
                found.append(group)
    return own, found


def show_gradients_of(optimizer: torch.optim.Optimizer) -> None:
    """Waits for the gradients of models' own parameters that `optimizer` steps, and fills their `.grad`."""
    for group in stepped_groups(optimizer):
        group.show_gradients()


def changed_from_outside(optimizer: torch.optim.Optimizer) -> None:
    """Publishes changes that `optimizer` made to parameters after the step function that used them."""
    for group in split_parameters(optimizer)[1]:
        group.changed_from_outside()


class _Waiting(threading.local):
    groups: Sequence[ParameterOwner] = ()


_waiting = _Waiting()


def waiting_groups(stepped: ParameterOwner) -> list[ParameterOwner]:
    """The other groups of models that have gradients which no step has consumed. Caller's thread."""
    return [group for group in list(owners) if group is not stepped and group.models.has_gradients()]


@contextmanager
def beside(waiting: Sequence[ParameterOwner]) -> Iterator[None]:
    """Makes this thread refuse, until the block ends, steps that would leave out gradients of the `waiting` groups."""
    before, _waiting.groups = _waiting.groups, waiting
    try:
        yield
    finally:
        _waiting.groups = before


def _refuse_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if a step function's optimizer has parameters of another model whose gradients still wait for
    that model's step, so that it would do nothing."""
    for group in split_parameters(optimizer)[1]:
        if any(group is waiting for waiting in _waiting.groups) and not group.has_landed_gradients:
            raise ValueError(
                f"[step] the {type(optimizer).__name__} of the step function has parameters of another model, whose "
                "gradients wait for a step of that model and are not here; call that model's step first, or step this "
                "optimizer in its step function"
            )


def _refuse_own_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if a step function's optimizer has parameters that get no gradients there."""
    own, _ = split_parameters(optimizer)
    for group in list(owners):
        if group.owns_trained(own):
            raise ValueError(
                f"[step] the {type(optimizer).__name__} of the step function has the model's own parameters, which get "
                "no gradients here; give it model.optim_parameters(), or call optimizer.step() outside of model.step"
            )
