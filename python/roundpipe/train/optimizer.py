"""The optimizer and the learning rate that a configuration asks for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from roundpipe import optim
from roundpipe.model.pipe import RoundPipe
from roundpipe.optim.for_model import ForModel
from roundpipe.step.binding import Moments
from roundpipe.train.config import TrainConfig, refused

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


def rate_factor(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """Maps a step, counted from 0, to its part of the highest learning rate.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    warmup, floor = config.warmup_steps, config.floor
    if warmup > steps:
        raise refused("warmup_steps", warmup, f"at most the number of steps, which is {steps}")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        share = min(1.0, (step - warmup) / (steps - warmup)) if steps > warmup else 1.0
        fallen = 1 - share if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        return floor + (1 - floor) * fallen

    return factor


def make_schedule(optimizer: Any, config: TrainConfig, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of a run of so many steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(config, steps))
