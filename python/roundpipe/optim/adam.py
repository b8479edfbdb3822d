"""Adam and its variants."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.adam import adam as adam  # the published package has it under this name

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class _Moments(HostStep):
    """Optimizers with `betas` and `eps`."""

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group["betas"])
        hyper.eps = group["eps"]
        hyper.amsgrad = group.get("amsgrad", False)
        hyper.momentum_decay = group.get("momentum_decay", 0.0)
        hyper.decoupled_weight_decay = group.get("decoupled_weight_decay", False)
        return hyper


class Adam(_Moments, torch.optim.Adam):
    """`torch.optim.Adam`."""

    algorithm = _core.Algorithm.ADAM


class AdamW(_Moments, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    algorithm = _core.Algorithm.ADAMW


class Adamax(_Moments, torch.optim.Adamax):
    """`torch.optim.Adamax`."""

    algorithm = _core.Algorithm.ADAMAX


class NAdam(_Moments, torch.optim.NAdam):
    """`torch.optim.NAdam`."""

    algorithm = _core.Algorithm.NADAM
    counters: ClassVar[dict[str, float | None]] = {"step": 0.0, "mu_product": 1.0}


class RAdam(_Moments, torch.optim.RAdam):
    """`torch.optim.RAdam`."""

    algorithm = _core.Algorithm.RADAM
