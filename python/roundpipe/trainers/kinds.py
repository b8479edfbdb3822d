"""Which of TRL's trainers a trainer in the pipeline may be, and what is said of the others. Imports no trainers."""

from __future__ import annotations

from collections.abc import Iterable

_WITH_REFERENCE = frozenset({"DPOTrainer", "KTOTrainer"})
_SUPPORTED = _WITH_REFERENCE | {"RewardTrainer", "SFTTrainer"}

# Their names without "Trainer".
_GENERATING = (
    "A2PO", "AsyncDistillation", "AsyncGRPO", "Distillation", "GKD", "GMPO", "GOLD", "GRPO", "IWOPD", "NashMD",
    "OnlineDPO", "PPO", "RLOO", "SDFT", "SDPO", "ServerDistillation", "XPO",
)  # fmt: skip


def check_kind(where: str, kind: type, in_pipeline: bool) -> None:
    """Refuses trainers of TRL whose steps the pipeline cannot make, or whose changes of the model it would not see.

    Args:
        where: tags the messages.
        kind: the trainer's class.
        in_pipeline: whether the model or the reference that it was given is in the pipeline.

    Raises:
        ValueError: the trainer is not supported, or needs plain models.
    """
    theirs = _of_trl(kind)
    for each in theirs:
        if each.__name__ not in _SUPPORTED or not each.__module__.startswith(("trl.trainer.", "trl.experimental.kto")):
            known = f"expected one of {', '.join(sorted(_SUPPORTED))}"
            full = f"{each.__module__}.{each.__name__}"
            why = generates(each.__name__)
            raise ValueError(f"[{where}] {full} is not supported{why and f': {why}'}; {known}")
    if theirs and in_pipeline:
        raise ValueError(
            f"[{where}] the model or its reference is in the pipeline already, expected plain ones, since "
            f"{theirs[0].__name__} changes them before they are wrapped; give the plain models"
        )


def has_reference(kind: type) -> bool:
    """Whether a trainer compares its model with a reference, which TRL keeps as `ref_model` or as adapters."""
    return any(each.__name__ in _WITH_REFERENCE for each in _of_trl(kind))


def generates(trainer: str) -> str:
    """Why a trainer of TRL that generates during training is not there, and what is; empty for other trainers."""
    if trainer.removesuffix("Trainer") not in _GENERATING:
        return ""
    return (
        "it generates during training, which the pipeline does not do yet; generate and judge completions before, and "
        "train on them with RoundPipeDPOTrainer (pairs), RoundPipeKTOTrainer (good or bad) or RoundPipeSFTTrainer"
    )


def no_trainer(name: str, known: Iterable[str]) -> str:
    """The message for a trainer `name` that roundpipe.huggingface does not have."""
    why = generates(name.removeprefix("RoundPipe"))
    instead = why or (
        "for another trainer of transformers, write `class Mine(RoundPipeTrainerMixin, TheirTrainer)`, see "
        "docs/trainer.md"
    )
    return f"[roundpipe.huggingface] there is no {name}, expected one of {', '.join(sorted(known))}; {instead}"


def _of_trl(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.startswith("trl.") and each.__name__[0] != "_"]
