"""Models from transformers: loading pretrained models, evaluating them on held-out batches, and Trainers for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe.trainers.trainer import RoundPipeTrainer

# The module of each trainer; imported on first use, because transformers' and TRL's trainers take seconds.
_TRAINERS = {
    "RoundPipeAccelerator": "trainers.accelerator",
    "RoundPipeDPOTrainer": "trainers.trl_trainers",
    "RoundPipeSFTTrainer": "trainers.trl_trainers",
    "RoundPipeTrainer": "trainers.trainer",
}

__all__ = ["RoundPipeAccelerator", "RoundPipeDPOTrainer", "RoundPipeSFTTrainer", "RoundPipeTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _TRAINERS:
        raise AttributeError(f"module 'roundpipe.huggingface' has no attribute '{name}'")
    return getattr(importlib.import_module(f"roundpipe.{_TRAINERS[name]}"), name)
