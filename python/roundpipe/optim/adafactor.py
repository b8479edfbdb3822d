"""Adafactor."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.optim.host_step import HostStep


class Adafactor(HostStep, torch.optim.Adafactor):
    """`torch.optim.Adafactor`."""

    algorithm = _core.Algorithm.ADAFACTOR
    dtypes = (torch.float32,)
    state_is_like_parameter = False

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        eps1, hyper.eps2 = group["eps"]
        hyper.eps = torch.finfo(torch.float32).eps if eps1 is None else eps1
        hyper.beta2_decay = group["beta2_decay"]
        hyper.clip_threshold = group["d"]
        return hyper
