"""Checkpoints of the demo's training, and how a run goes on from the newest one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import roundpipe
from roundpipe.demo.report import RunReporter
from roundpipe.demo.training import EvaluationRecord, FusedSteps, Progress, RandomBatches, StepRecord

CHECKPOINTS_FOLDER = "checkpoints"
_KEEP_LAST = 2


class Checkpoints:
    """The loop's saver, in a folder of its own.

    Args:
        folder: of the checkpoints and their journal.
        every: a checkpoint after this many steps; None saves nothing.
        steps: has the model, its optimizer and its schedule.
        batches: what the loop reads.
        reporter: its records are saved, too, for the curve.

    Attributes:
        progress: where the training begins.
    """

    def __init__(
        self, folder: Path, every: int | None, steps: FusedSteps, batches: RandomBatches, reporter: RunReporter
    ) -> None:
        self.progress = Progress()
        self._folder, self._every = folder, every
        self._steps, self._batches, self._reporter = steps, batches, reporter
        self._journal: roundpipe.RunJournal | None = None

    def begin(self, resume: bool) -> None:
        """Makes everything ready for the first step. With `resume`, loads the newest checkpoint if there is one."""
        if resume and roundpipe.latest(self._folder) is not None:
            steps = self._steps
            loaded = roundpipe.load_checkpoint(
                self._folder,
                steps.model,
                steps.optimizer,
                lr_scheduler=steps.scheduler,
                state={"data": self._batches},
            )
            self.progress = Progress(**loaded.state["progress"])
            steps.go_on_after(self.progress.step)
            self._reporter.go_on_after(
                [StepRecord(**record) for record in loaded.state["steps"]],
                [EvaluationRecord(**record) for record in loaded.state["evaluations"]],
            )
        if self._every is not None:
            self._journal = roundpipe.RunJournal(self._folder, after_step=self.progress.step)

    def on_step(self, record: StepRecord) -> None:
        """Records a completed step."""
        if self._journal is not None:
            self._journal.record(record.step, loss=record.loss, tokens=record.tokens)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether `save` is to be called after this step; a run that is stopped saves its last one."""
        return self._every is not None and (is_last or step % self._every == 0)

    def save(self, progress: Progress) -> None:
        """Begins to write a checkpoint. Every loss up to it has been reported."""
        reporter = self._reporter
        roundpipe.save_checkpoint(
            self._folder,
            self._steps.model,
            self._steps.optimizer,
            step=progress.step,
            lr_scheduler=self._steps.scheduler,
            state={
                "data": self._batches,
                "progress": asdict(progress),
                "steps": [asdict(record) for record in reporter.step_records],
                "evaluations": [asdict(record) for record in reporter.evaluation_records],
            },
            keep_last=_KEEP_LAST,
        )
