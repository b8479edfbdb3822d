"""TRL's trainers over a model in the pipeline."""

from __future__ import annotations

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

from roundpipe.trainers.trainer import RoundPipeTrainer


class RoundPipeSFTTrainer(RoundPipeTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains its model in the pipeline; see `RoundPipeTrainerMixin`."""


class RoundPipeRewardTrainer(RoundPipeTrainer, RewardTrainer):
    """`trl.RewardTrainer` that trains its model in the pipeline; see `RoundPipeTrainerMixin`."""


class RoundPipeDPOTrainer(RoundPipeTrainer, DPOTrainer):
    """`trl.DPOTrainer` that trains its model in the pipeline, with its reference; see `RoundPipeTrainerMixin`."""


class RoundPipeKTOTrainer(RoundPipeTrainer, KTOTrainer):
    """`trl.KTOTrainer` that trains its model in the pipeline, with its reference; see `RoundPipeTrainerMixin`."""
