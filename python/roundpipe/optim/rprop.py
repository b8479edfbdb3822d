"""Resilient backpropagation."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class Rprop(HostStep, torch.optim.Rprop):
    """`torch.optim.Rprop`."""

    algorithm = _core.Algorithm.RPROP

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.eta_minus, hyper.eta_plus = group["etas"]
        hyper.step_size_min, hyper.step_size_max = group["step_sizes"]
        return hyper
