"""The optimizer and the learning rate that a configuration asks for."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import optim
from roundpipe.model.pipe import RoundPipe
from roundpipe.model.step.fused_optimizer import Masters, Moments
from roundpipe.optim.for_model import ForModel
from roundpipe.train.config import TrainConfig

_RULES: dict[str, type[ForModel]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
    "rmsprop": optim.RMSprop,
    "muon": optim.Muon,
}


def make_optimizer(model: RoundPipe, config: TrainConfig) -> Any:
    """The optimizer of a model. Norms and biases have no weight decay; what is not set is the update rule's default."""
    options: dict[str, Any] = dict(config.rule_options)
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if options.pop("match_rms_adamw", 0):
        options["adjust_lr_fn"] = "match_rms_adamw"
    if config.optimizer == "muon":
        beside = config.beside_muon
        options["adamw"] = {"betas": (beside["beta1"], beside["beta2"]), "eps": beside["eps"]}
    moments: Moments = "8bit" if config.moments == "8bit" else "float32"
    masters: Masters = "24bit" if config.masters == "24bit" else "float32"
    return _RULES[config.optimizer](
        model,
        decay_norms_and_biases=False,
        moments=moments,
        masters=masters,
        gradients="at_once" if config.gradients_at_once else "weights",
        disk=config.disk,
        disk_memory=config.disk_memory,
        disk_holds=config.disk_holds,
        **options,
    )


def make_schedule(optimizer: Any, config: TrainConfig, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of a run of so many steps.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    factor = config.rate_factor(steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step))  # a function, which is not saved
