"""The loss scale of a run with weights in float16, and the steps that it costs."""

from __future__ import annotations

from typing import Any

from roundpipe import _core
from roundpipe.model.step.fused_optimizer import Step
from roundpipe.model.step.scaler import GradScaler


class LossScaling:
    """A scaler as torch makes it, and the count of the steps that it skips, which goes into checkpoints.

    Attributes:
        scaler: of the losses; its own state is saved apart.
    """

    def __init__(self) -> None:
        self.scaler = GradScaler()
        self._skipped = _core.SkippedSteps()

    def count(self, step: int, made: Step, scale: float) -> int:
        """Counts a step whose loss was multiplied by `scale`, and returns how many were skipped so far.

        Raises:
            RoundPipeError: it was skipped although the scale cannot be the cause, see `SkippedSteps` of the engine.
        """
        self._skipped.add(step, made.skipped, scale)
        return self._skipped.count

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"count": self._skipped.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        self._skipped = _core.SkippedSteps(state["count"])
