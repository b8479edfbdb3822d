"""The optimizer and the learning rate that a configuration asks for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from roundpipe import optim
from roundpipe.model.pipe import RoundPipe
from roundpipe.optim.for_model import ForModel
from roundpipe.step.fused_optimizer import Moments
from roundpipe.train.config import TrainConfig

_RULES: dict[str, type[ForModel]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
    "rmsprop": optim.RMSprop,
}


def make_optimizer(model: RoundPipe, config: TrainConfig) -> Any:
    """The optimizer of a model. Norms and biases have no weight decay; what is not set is the update rule's default."""
    values: dict[str, Any] = {"lr": config.highest_rate, "weight_decay": config.weight_decay}
    rule = _RULES[config.optimizer]
    betas = _betas(rule, config)
    if betas is not None:
        values["betas"] = betas
    for name in ("eps", "momentum"):
        if getattr(config, name) is not None:
            values[name] = getattr(config, name)
    moments: Moments = "8bit" if config.moments == "8bit" else "float32"
    return rule(model, decay_norms_and_biases=False, moments=moments, **values)


def _betas(rule: type[ForModel], config: TrainConfig) -> tuple[float, float] | None:
    if config.beta1 is None and config.beta2 is None:
        return None
    default = inspect.signature(rule).parameters["betas"].default
    given = (config.beta1, config.beta2)
    return tuple(mine if one is None else one for one, mine in zip(given, default, strict=True))  # type: ignore[return-value]


def make_schedule(optimizer: Any, config: TrainConfig, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of a run of so many steps.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    factor = config.rate_factor(steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step))  # a function, which is not saved
