"""The optimizer's copy of a parameter, whose `.grad` appears when PyTorch's would."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.model.step.models import SteppedModels
from roundpipe.model.step.optimizer_context import in_optimizer_context

_GROUP = "_roundpipe_group"
_gradient: Any = torch.Tensor.grad


class ParameterOwner(Protocol):
    """The part of `TorchSteps` and `FusedSteps` that torch's hooks use."""

    models: SteppedModels

    def finish_update(self) -> None: ...

    def show_gradients(self) -> None: ...

    def owns_trained(self, ids: set[int]) -> bool: ...

    def begin_plain_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def finish_plain_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class CopyOwner(ParameterOwner, Protocol):
    """The part of `TorchSteps` that its copies of parameters use."""

    def hand_over(self) -> None: ...

    @property
    def has_landed_gradients(self) -> bool: ...

    def changed_from_outside(self) -> None: ...


class OptimizerParameter(nn.Parameter):
    """A parameter that `optim_parameters()` gives to an optimizer.

    The engine sums the gradients. A step function of `model.step` finds them handed over. Elsewhere, reading or writing
    `.grad` first waits for the backward and hands them over, so `optimizer.step()`, `optimizer.zero_grad()` and
    `clip_grad_norm_` behave as in a plain loop.
    """

    def attach(self, group: CopyOwner) -> None:
        """Makes `group` hand gradients over to this parameter."""
        self.__dict__[_GROUP] = weakref.ref(group)

    def group(self) -> CopyOwner | None:
        """The group that owns this parameter; None for a copy of the parameter."""
        reference = self.__dict__.get(_GROUP)
        return None if reference is None else reference()

    @property
    def landed_grad(self) -> torch.Tensor | None:
        """The current `.grad`, without waiting."""
        gradient: torch.Tensor | None = _gradient.__get__(self)
        return gradient

    @landed_grad.setter
    def landed_grad(self, gradient: torch.Tensor | None) -> None:
        _gradient.__set__(self, gradient)

    def _receive(self) -> None:
        group = None if in_optimizer_context() else self.group()
        if group is not None:
            group.hand_over()

    @property
    def grad(self) -> torch.Tensor | None:
        self._receive()
        return self.landed_grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._receive()
        self.landed_grad = gradient

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickles as a plain parameter, because it then belongs to no model.
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != _GROUP})
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
