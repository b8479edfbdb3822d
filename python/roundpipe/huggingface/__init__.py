"""Models from transformers: loading pretrained models, evaluating them on held-out batches, and Trainers for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from roundpipe.trainers.kinds import no_trainer

if TYPE_CHECKING:
    from roundpipe.trainers.trainer import RoundPipeSeq2SeqTrainer, RoundPipeTrainer, RoundPipeTrainerMixin

# The module of each trainer; imported on first use, because transformers' and TRL's trainers take seconds.
_TRAINERS = {
    "RoundPipeAccelerator": "trainers.accelerator",
    "RoundPipeDPOTrainer": "trainers.trl_trainers",
    "RoundPipeKTOTrainer": "trainers.trl_trainers",
    "RoundPipeRewardTrainer": "trainers.trl_trainers",
    "RoundPipeSFTTrainer": "trainers.trl_trainers",
    "RoundPipeSeq2SeqTrainer": "trainers.trainer",
    "RoundPipeTrainer": "trainers.trainer",
    "RoundPipeTrainerMixin": "trainers.trainer",
}

__all__ = [
    "RoundPipeAccelerator",
    "RoundPipeDPOTrainer",
    "RoundPipeKTOTrainer",
    "RoundPipeRewardTrainer",
    "RoundPipeSFTTrainer",
    "RoundPipeSeq2SeqTrainer",
    "RoundPipeTrainer",
    "RoundPipeTrainerMixin",
]


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:
        return getattr(importlib.import_module(f"roundpipe.{_TRAINERS[name]}"), name)
    if name.startswith("RoundPipe") and name.endswith("Trainer"):
        # `from ... import` drops the message of an AttributeError.
        raise ImportError(no_trainer(name, _TRAINERS), name=__name__)
    raise AttributeError(f"module 'roundpipe.huggingface' has no attribute '{name}'")
