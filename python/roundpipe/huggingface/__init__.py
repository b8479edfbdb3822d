"""Models from transformers: loading pretrained models, evaluating them on held-out batches, and Trainers for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe.trainer.trainer import RoundPipeTrainer

# The module of each trainer; imported on first use, because transformers' and TRL's trainers take seconds.
_TRAINERS = {
    "RoundPipeAccelerator": "trainer.accelerator",
    "RoundPipeDPOTrainer": "trainer.trl_trainers",
    "RoundPipeSFTTrainer": "trainer.trl_trainers",
    "RoundPipeTrainer": "trainer.trainer",
}

__all__ = ["RoundPipeAccelerator", "RoundPipeDPOTrainer", "RoundPipeSFTTrainer", "RoundPipeTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _TRAINERS:
        raise AttributeError(f"module 'roundpipe.huggingface' has no attribute '{name}'")
    return getattr(importlib.import_module(f"roundpipe.{_TRAINERS[name]}"), name)
