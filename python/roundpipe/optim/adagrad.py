"""Optimizers that divide by a running root mean square of the gradient."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class Adagrad(HostStep, torch.optim.Adagrad):
    """`torch.optim.Adagrad`."""

    algorithm = _core.Algorithm.ADAGRAD

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.eps = group["eps"]
        hyper.lr_decay = group["lr_decay"]
        hyper.initial_accumulator_value = self.defaults["initial_accumulator_value"]  # torch ignores the group's value
        return hyper


class Adadelta(HostStep, torch.optim.Adadelta):
    """`torch.optim.Adadelta`."""

    algorithm = _core.Algorithm.ADADELTA

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.eps = group["eps"]
        hyper.rho = group["rho"]
        return hyper


class RMSprop(HostStep, torch.optim.RMSprop):
    """`torch.optim.RMSprop`."""

    algorithm = _core.Algorithm.RMSPROP

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.eps = group["eps"]
        hyper.alpha = group["alpha"]
        hyper.momentum = group["momentum"]
        hyper.centered = group["centered"]
        return hyper
