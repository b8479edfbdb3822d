"""The step that all RoundPipe optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch.autograd.graph import increment_version

from roundpipe import _core
from roundpipe.model.step.optimizer_parameter import OptimizerParameter
from roundpipe.optim.for_model import ForModel

_PLAIN = (torch.Tensor, torch.nn.Parameter, OptimizerParameter)
_FORMAT = _core.MomentFormat.FLOAT32


class HostStep(ForModel):
    """Makes `step` use RoundPipe's kernels where they apply; put it before a torch optimizer among the bases.

    The kernels apply to dense fp32 and complex64 parameters on the host. The torch optimizer's own `step` updates all
    other parameters, and every parameter if a group asks for `differentiable` or `capturable`. State has torch's names,
    shapes and dtypes, so that either implementation can resume from the other's state.
    """

    # State besides tensors like the parameter, with its value before the first step; None: the group's lr.
    counters: ClassVar[dict[str, float | None]] = {"step": 0.0}
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.complex64)
    state_is_like_parameter: ClassVar[bool] = True  # the state's tensors have the parameter's shape and memory layout

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        """The group's hyperparameters for the kernels; subclasses add their own."""
        hyper = _core.Hyperparameters()
        hyper.lr = float(group["lr"])
        hyper.weight_decay = float(group.get("weight_decay", 0))
        hyper.maximize = group.get("maximize", False)
        return hyper

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; `closure` computes the loss again and returns it.

        For an optimizer made for a model, this is `model.step(optimizer, is_async=False)`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.binding is not None:
            self._group.step_fused(self, is_async=False)
            return loss
        with torch.no_grad():
            ours = [[p for p in group["params"] if self._is_ours(p, group)] for group in self.param_groups]
            self._step_others({p for params in ours for p in params})
            for params, group in zip(ours, self.param_groups, strict=True):
                if params:
                    hyper = self.hyperparameters(group)
                    for parameter in params:
                        self._update(parameter, hyper)
        return loss

    def _is_ours(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        gradient = parameter.grad
        if gradient is None or group.get("differentiable") or group.get("capturable"):
            return False
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            return False  # a GradScaler leaves unscaling to torch's fused kernels
        return (
            parameter.dtype in self.dtypes
            and gradient.dtype == parameter.dtype
            and all(
                type(x) in _PLAIN and x.layout == torch.strided and x.device.type == "cpu"
                for x in (parameter, gradient)
            )
            and not parameter.is_inference()
            and _is_dense(parameter)
        )

    def _step_others(self, ours: set[torch.Tensor]) -> None:
        """Runs torch's step for the parameters outside `ours`; it skips parameters without a gradient."""
        groups = self.param_groups
        if all(p.grad is None or p in ours for group in groups for p in group["params"]):
            return
        torch_step = _torch_step(type(self))
        with _hidden_gradients(ours):
            torch_step(self)

    def _update(self, parameter: torch.Tensor, hyper: _core.Hyperparameters) -> None:
        values = _real(parameter)
        names = _core.state_names(self.algorithm, hyper, _FORMAT, tuple(values.shape))
        state, scalars = self._prepare(parameter, names, hyper)
        if self.state_is_like_parameter:
            for name in names:
                state[name] = _in_order_of(parameter, state[name])
        kept = _core.ParameterState(scalars, [_real(state[name]) for name in names])
        gradient = _real(_in_order_of(parameter, cast(torch.Tensor, parameter.grad)))
        _core.update(self.algorithm, hyper, _FORMAT, kept, values, values, None, None, gradient)
        for name in self.counters:
            state[name].fill_(getattr(kept.scalars, name))
        increment_version(parameter)

    def _prepare(
        self, parameter: torch.Tensor, names: list[str], hyper: _core.Hyperparameters
    ) -> tuple[dict[str, torch.Tensor], _core.Scalars]:
        """Returns the parameter's state and its counters, and makes the state if there is none yet."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if len(state) == 0:
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            for name, value in self.counters.items():
                state[name] = torch.tensor(hyper.lr if value is None else value, dtype=dtype)
            made = _core.make_state(self.algorithm, hyper, _FORMAT, _real(parameter))
            for name, tensor in zip(names, made.tensors, strict=True):
                state[name] = torch.view_as_complex(tensor) if parameter.is_complex() else tensor
        scalars = _core.Scalars()
        for name in self.counters:
            setattr(scalars, name, state[name].item())
        return state, scalars


def _torch_step(optimizer: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of the torch optimizer behind HostStep, without the hooks, because our own step has called them."""
    bases = optimizer.__mro__
    step: Any = next(vars(base)["step"] for base in bases[bases.index(HostStep) + 1 :] if "step" in vars(base))
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


@contextmanager
def _hidden_gradients(parameters: set[torch.Tensor]) -> Iterator[None]:
    gradients = {parameter: parameter.grad for parameter in parameters}
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()


def _in_order_of(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` with the parameter's memory layout."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype).copy_(tensor)
