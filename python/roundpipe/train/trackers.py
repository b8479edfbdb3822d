"""Where a run's numbers go beside the screen: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundpipe.checkpoints.runs.lines import Lines
from roundpipe.train.config import TrainConfig
from roundpipe.train.loop import EvaluationRecord, Observer, StepRecord


class All:
    """Tells several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def on_step(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.on_step(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        for observer in self._observers:
            observer.on_evaluation(record)


class Metrics:
    """Writes `metrics.jsonl`."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def on_step(self, record: StepRecord) -> None:
        self._lines.add(record.line())

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._lines.add(record.line())


class TensorBoard:
    """Writes event files. If they cannot be written, training goes on without them.

    Args:
        folder: TensorBoard's `--logdir`, or a folder in it; made if it is not there.
        after_step: a run that goes on after this step; what an earlier attempt wrote of later ones is not shown.

    Raises:
        ValueError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, after_step: int = 0) -> None:
        self._writer = imported_tensorboard().SummaryWriter(str(folder), purge_step=after_step + 1)
        self._is_broken = False

    def on_step(self, record: StepRecord) -> None:
        self._add(record.step, record.metrics() | {"tokens_per_second": record.tokens_per_s})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._add(record.step, record.metrics())

    def _add(self, step: int, values: dict[str, Any]) -> None:
        if self._is_broken:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is left."""
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._is_broken:
            print(f"[train] TensorBoard's file cannot be written: {error.strerror}; training goes on", file=sys.stderr)
        self._is_broken = True


class WeightsAndBiases:
    """Logs to a project of Weights & Biases, as a run that is named after the folder.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(self, project: str, config: TrainConfig) -> None:
        self._run = imported_wandb().init(
            project=project, name=config.out, config=dataclasses.asdict(config), resume="allow"
        )

    def on_step(self, record: StepRecord) -> None:
        self._run.log(record.metrics() | {"tokens_per_second": record.tokens_per_s}, step=record.step)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._run.log(record.metrics(), step=record.step)

    def close(self) -> None:
        self._run.finish()


def imported_tensorboard() -> Any:
    """torch's writer; ValueError if tensorboard is not installed."""
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ValueError(
            "[train] --tensorboard needs tensorboard, which is not installed; pip install 'tensorboard>=2.18,<3'"
        ) from None


def imported_wandb() -> Any:
    """The package; ValueError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError("[train] --wandb needs wandb, which is not installed; pip install wandb") from None
