"""Which of TRL's trainers a trainer in the pipeline may be."""

from __future__ import annotations

from typing import Any

from roundpipe.trainers.host import is_in_pipeline

_SUPPORTED = frozenset({"DPOTrainer", "RewardTrainer", "SFTTrainer"})


def check_kind(where: str, kind: type, model: Any) -> None:
    """Refuses trainers of TRL whose steps the pipeline cannot make, or whose changes of the model it would not see.

    Args:
        where: tags the messages.
        kind: the trainer's class.
        model: what it was given.

    Raises:
        ValueError: the trainer is not supported, or needs a plain model.
    """
    names = [each.__name__ for each in kind.__mro__]
    theirs = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("trl.") and each.__name__[0] != "_"]
    other = next((name for name in theirs if name not in _SUPPORTED), None)
    if other is not None:
        raise ValueError(f"[{where}] TRL's {other} is not supported, expected one of {', '.join(sorted(_SUPPORTED))}")
    if "DPOTrainer" in theirs and "RoundPipeDPOTrainer" not in names:
        raise ValueError(
            f"[{where}] {kind.__name__} is a DPOTrainer, expected a RoundPipeDPOTrainer, which takes care of the "
            "reference; derive from roundpipe.huggingface.RoundPipeDPOTrainer"
        )
    if theirs and is_in_pipeline(model):
        raise ValueError(
            f"[{where}] the model is in the pipeline already, expected a plain one, since {theirs[0]} changes it "
            "before it is wrapped; give the plain model"
        )
