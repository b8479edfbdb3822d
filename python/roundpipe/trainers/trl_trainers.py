"""TRL's trainers over a model in the pipeline."""

from __future__ import annotations

from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from roundpipe.trainers.adapters import keep_trained
from roundpipe.trainers.trainer import RoundPipeTrainer


class RoundPipeSFTTrainer(RoundPipeTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains its model in the pipeline; see `RoundPipeTrainer`."""


class RoundPipeDPOTrainer(RoundPipeTrainer, DPOTrainer):
    """`trl.DPOTrainer` that trains its model in the pipeline; see `RoundPipeTrainer`.

    With adapters, the reference is the base without them, or a copy of the adapters that were given. Without adapters,
    the reference model is in the pipeline, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ref_model is not None:
            reference: Any = super()._wrapped(self.ref_model)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if is_peft_model(model):
            keep_trained(model)
        return super()._wrapped(model)
