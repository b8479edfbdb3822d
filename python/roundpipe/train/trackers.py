"""Where a run's numbers go beside the screen: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from roundpipe.runs.event_file import EventFile
from roundpipe.runs.lines import Lines
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
        self._lines.write(record.step, record.metrics())

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._lines.write(record.step, record.metrics())


class TensorBoard:
    """Writes an event file. If it cannot be written, training goes on without it."""

    def __init__(self, events: EventFile) -> None:
        self._events = events
        self._is_broken = False

    def on_step(self, record: StepRecord) -> None:
        self._add(record.step, record.metrics() | {"tokens_per_second": record.tokens_per_s})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._add(record.step, record.metrics())

    def _add(self, step: int, values: dict[str, Any]) -> None:
        if self._is_broken:
            return
        try:
            self._events.add(step, {name: value for name, value in values.items() if value is not None})
        except OSError as error:
            self._is_broken = True
            print(f"[train] TensorBoard's file cannot be written: {error.strerror}; training goes on", file=sys.stderr)


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


def imported_wandb() -> Any:
    """The package; ValueError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError("[train] --wandb needs wandb, which is not installed; pip install wandb") from None
