"""Lion (Chen et al. 2023, arXiv:2302.06675), which torch.optim does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class _TorchLion(torch.optim.Optimizer):
    """Lion with torch's operations, for parameters that RoundPipe does not update itself."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"[Lion] lr is {lr}, expected a number that is not negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"[Lion] betas are {betas}, expected two numbers from 0 up to but not including 1")
        if not weight_decay >= 0:
            raise ValueError(f"[Lion] weight_decay is {weight_decay}, expected a number that is not negative")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_with_torch(parameter, group)
        return loss

    def _update_with_torch(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("[Lion] got a sparse gradient, expected a dense one; use an optimizer for sparse ones")
        state = self.state[parameter]
        if len(state) == 0:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
        state["step"] += 1
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        weights, average, change = (
            torch.view_as_real(x) if x.is_complex() else x
            for x in (parameter, state["exp_avg"], -gradient if group["maximize"] else gradient)
        )
        weights.mul_(1 - lr * group["weight_decay"])
        weights.add_(average.mul(beta1).add_(change, alpha=1 - beta1).sign_(), alpha=-lr)
        average.mul_(beta2).add_(change, alpha=1 - beta2)


class Lion(HostStep, _TorchLion):
    """Lion: steps of size lr in the direction of the sign of a running mean; decoupled weight decay.

    Args:
        params: parameters, or groups of them, as in every torch optimizer.
        lr: step size; about a tenth of AdamW's.
        betas: decay of the running mean, first in the update, then from step to step.
        weight_decay: share of the weights that a step subtracts, times lr; about ten times AdamW's.
        maximize: ascend the gradient instead of descending.
    """

    algorithm = _core.Algorithm.LION

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.beta1, hyper.beta2 = group["betas"]
        return hyper
