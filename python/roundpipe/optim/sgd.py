"""Stochastic gradient descent, plain and averaged."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class SGD(HostStep, torch.optim.SGD):
    """`torch.optim.SGD`."""

    algorithm = _core.Algorithm.SGD
    counters: ClassVar[dict[str, float | None]] = {}

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.momentum = group["momentum"]
        hyper.dampening = group["dampening"]
        hyper.nesterov = group["nesterov"]
        return hyper

    def _prepare(
        self, parameter: torch.Tensor, names: list[str], hyper: _core.Hyperparameters
    ) -> tuple[dict[str, torch.Tensor], _core.Scalars]:
        # torch counts no steps: in the first step, there is no momentum buffer.
        scalars = _core.Scalars()
        if not names:
            return {}, scalars
        state: dict[str, torch.Tensor] = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            scalars.step = 1.0
        return state, scalars


class ASGD(HostStep, torch.optim.ASGD):
    """`torch.optim.ASGD`."""

    algorithm = _core.Algorithm.ASGD
    counters: ClassVar[dict[str, float | None]] = {"step": 0.0, "eta": None, "mu": 1.0}

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.lambd = group["lambd"]
        hyper.alpha = group["alpha"]
        hyper.t0 = group["t0"]
        return hyper
