"""The training loop: steps, evaluations, checkpoints, and where a run that goes on begins."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

import roundpipe
from roundpipe import _core
from roundpipe.model.step.fused_optimizer import Step
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData
from roundpipe.train.nodes import RunNodes
from roundpipe.train.tasks.loss_scaling import LossScaling
from roundpipe.train.tasks.objective import Begun, Objective, Told, of_all

StepRecord: TypeAlias = _core.StepRecord
EvaluationRecord: TypeAlias = _core.EvaluationRecord


class Observer(Protocol):
    """Is told of each step and each evaluation, in order."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_evaluation(self, record: EvaluationRecord) -> None: ...


@dataclass
class _Begun:
    """A step whose loss has not been read.

    Attributes:
        call: this node's; None: the node has no rows.
        tokens: of the whole batch.
        scale: by which the loss is multiplied; None: it is not.
    """

    step: int
    call: Begun | None
    made: Step
    rate: float
    tokens: int
    scale: float | None


class Training:
    """A run of steps.

    Args:
        config: of the run.
        model: in training mode.
        optimizer: of the model.
        schedule: of its learning rate.
        data: the batches.
        folder: of the checkpoints.
        nodes: which share each batch's rows. All methods are collective.
        objective: makes the calls.

    Attributes:
        step: the last step of which the observer was told.
        last_call: this node's last call, for its timeline; None: it has made none.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: roundpipe.RoundPipe,
        optimizer: Any,
        schedule: Any,
        data: RunData,
        folder: Path,
        nodes: RunNodes,
        objective: Objective,
    ) -> None:
        self._config, self._model, self._optimizer, self._schedule = config, model, optimizer, schedule
        self._data, self._folder, self._nodes, self._objective = data, folder, nodes, objective
        self._scaling = LossScaling() if _has_float16(model) else None
        self._journal: roundpipe.RunJournal | None = None
        self._observer: Observer | None = None
        self._since = 0.0
        self.step = 0
        self.last_call: Any = None

    def load(self) -> int:
        """Loads the newest checkpoint, and returns its step."""
        loaded = roundpipe.load_checkpoint(
            self._folder,
            self._model,
            self._optimizer,
            lr_scheduler=self._schedule,
            scaler=self._scaler,
            state=self._own_state(),
        )
        self.step = loaded.step
        return self.step

    def run(self, observer: Observer, stop: Callable[[], bool]) -> bool:
        """Makes the steps that are left, and evaluates before the first and after the last.

        Each step's batch is submitted before the loss of the last one is read, so devices do not wait for this loop.

        Args:
            observer: is told what happens.
            stop: whether to save and end, asked after each step; if one node says so, all end.

        Returns:
            Whether the run is complete.
        """
        self._observer = observer
        if self._nodes.is_first:
            self._journal = roundpipe.RunJournal(self._folder, after_step=self.step)
        if self.step == 0:
            self._evaluate(0)
        steps, every = self._data.steps, self._config.evaluate_every
        begun: _Begun | None = None
        saved = self.step
        self._since = time.perf_counter()
        batches = itertools.islice(self._data.train, steps - self.step)
        for step, batch in enumerate(batches, start=self.step + 1):
            is_evaluated = step == steps or (every is not None and step % every == 0)
            is_saved = self._config.save_every is not None and step % self._config.save_every == 0
            if begun is not None and (is_evaluated or is_saved):
                # This step is waited for, too: its time is not that of the one before.
                self._read(begun)
                begun = None
            following = self._begin(step, batch)
            if begun is not None:
                self._read(begun)
            begun = following
            is_stopped = any(self._nodes.each(stop))
            if is_stopped or is_evaluated or is_saved:
                self._read(begun)
                begun = None
            if is_evaluated:
                self._evaluate(step)
            if (is_saved or is_stopped) and step < steps:
                self._save(step)
                saved = step
            if is_stopped:
                break
        if begun is not None:
            self._read(begun)
        if self.step == steps:
            return True
        if saved != self.step:
            self._save(self.step)
        return False

    def _begin(self, step: int, batch: dict[str, Any]) -> _Begun:
        scaler = self._scaler
        if self._config.clip_by == "two_passes":
            self._objective.begin(batch, scaler)
            self._model.measure_gradients(self._optimizer)
        call = self._objective.begin(batch, scaler)
        scale = None if scaler is None else scaler.get_scale()
        rate = float(self._optimizer.param_groups[0]["lr"])
        made = self._model.step(
            self._optimizer,
            self._config.asynchronous,
            scaler=scaler,
            max_grad_norm=self._config.clip or math.inf,
            clip_by="measured_norm" if self._config.clip_by == "two_passes" else self._config.clip_by,
            lr_scheduler=self._schedule,
        )
        mask = batch.get("attention_mask")
        tokens = batch["input_ids"].numel() if mask is None else int(mask.sum())
        return _Begun(step, call, made, rate, tokens, scale)

    def _read(self, begun: _Begun) -> None:
        told = self._told(begun)
        loss, norm, skipped = told.loss, begun.made.grad_norm, 0
        if self._scaling is not None and begun.scale is not None:
            skipped = self._scaling.count(begun.step, begun.made, begun.scale)
        now = time.perf_counter()
        record = StepRecord(
            begun.step,
            loss,
            norm,
            begun.rate,
            now - self._since,
            begun.tokens,
            self._model.busy_share(),
            max(device["peak_bytes"] for device in roundpipe.devices().memory_report()),
            _core.resident_bytes(),
            begun.scale,
            skipped,
            told.accuracy,
        )
        self._since = now
        assert self._observer is not None
        self._note(begun.step, loss, norm)
        self.step = begun.step
        if begun.call is not None:
            self.last_call = begun.call.pending
        self._observer.on_step(record)

    def _told(self, begun: _Begun) -> Told:
        """What all nodes tell of a step's batch."""
        scale = 1.0 if begun.scale is None else begun.scale
        return of_all(self._nodes.each(lambda: Told(0.0, 0) if begun.call is None else begun.call.told(scale)))

    def _note(self, step: int, loss: float, norm: float) -> None:
        """Records a step in the journal. A journal that cannot be written does not end the training."""
        if self._journal is None:
            return
        try:
            self._journal.record(step, loss=loss, grad_norm=norm)
        except roundpipe.RoundPipeError as error:
            self._journal = None
            print(f"{error}\n[train] training goes on without the journal", file=sys.stderr)

    def _evaluate(self, step: int) -> None:
        if not self._data.held_out:
            return
        # Evaluations do not count among the calls that key the random numbers of steps.
        calls = self._model.calls
        told = of_all(self._nodes.each(lambda: self._objective.evaluate(self._data.held_out)))
        self._model.calls = calls
        assert self._observer is not None
        self._observer.on_evaluation(EvaluationRecord(step, told.loss, told.counted, told.accuracy))
        self._since = time.perf_counter()

    def _save(self, step: int) -> None:
        roundpipe.save_checkpoint(
            self._folder,
            self._model,
            self._optimizer,
            step=step,
            lr_scheduler=self._schedule,
            scaler=self._scaler,
            state=self._own_state(),
            keep_last=self._config.keep,
            overwrite=True,  # of a checkpoint that a run has gone back behind
        )

    @property
    def _scaler(self) -> roundpipe.GradScaler | None:
        return None if self._scaling is None else self._scaling.scaler

    def _own_state(self) -> dict[str, Any]:
        own = {"data": self._data.train}
        return own if self._scaling is None else own | {"skipped_steps": self._scaling}


def _has_float16(model: roundpipe.RoundPipe) -> bool:
    return any(parameter.dtype == torch.float16 for parameter in model.parameters())
