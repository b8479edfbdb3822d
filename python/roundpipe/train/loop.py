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
from roundpipe.data.balance import balanced_config
from roundpipe.data.collate import count_label_tokens
from roundpipe.huggingface.evaluation import held_out_sum
from roundpipe.model.call.loss_function import ScaledOutputs, outputs_as_loss
from roundpipe.model.step.fused_optimizer import Step
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData
from roundpipe.train.loss_scaling import LossScaling
from roundpipe.train.nodes import RunNodes

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
        pending: this node's call; None: the node has no rows.
        labels: of its rows, that count.
        tokens: of the whole batch.
        scale: by which the loss is multiplied; None: it is not.
    """

    step: int
    pending: Any
    labels: int
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
    ) -> None:
        self._config, self._model, self._optimizer, self._schedule = config, model, optimizer, schedule
        self._data, self._folder, self._nodes = data, folder, nodes
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
            following = self._begin(step, batch)
            if begun is not None:
                self._read(begun)
            begun = following
            is_stopped = any(self._nodes.each(stop))
            is_evaluated = step == steps or (every is not None and step % every == 0)
            is_saved = self._config.save_every is not None and step % self._config.save_every == 0
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
        rows = self._nodes.rows_of(batch)
        pending, labels, scaler = None, 0, self._scaler
        if rows is not None:
            cut = balanced_config(rows, self._config.microbatches)
            loss_fn = outputs_as_loss if scaler is None else ScaledOutputs(scaler)
            pending = self._model.submit(input_kwargs=rows, loss_fn=loss_fn, run_config=cut)
            labels = count_label_tokens(rows["labels"])
        scale = None if scaler is None else scaler.get_scale()
        rate = float(self._optimizer.param_groups[0]["lr"])
        made = self._model.step(
            self._optimizer,
            self._config.asynchronous,
            scaler=scaler,
            max_grad_norm=self._config.clip or math.inf,
            lr_scheduler=self._schedule,
        )
        mask = batch.get("attention_mask")
        tokens = batch["input_ids"].numel() if mask is None else int(mask.sum())
        return _Begun(step, pending, labels, made, rate, tokens, scale)

    def _read(self, begun: _Begun) -> None:
        loss, norm, skipped = self._loss_of(begun), begun.made.grad_norm, 0
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
        )
        self._since = now
        assert self._observer is not None
        self._note(begun.step, loss, norm)
        self.step = begun.step
        if begun.pending is not None:
            self.last_call = begun.pending
        self._observer.on_step(record)

    def _loss_of(self, begun: _Begun) -> float:
        """The mean over the labels of the whole batch."""
        told = self._nodes.each(lambda: (0.0 if begun.pending is None else float(begun.pending.loss()), begun.labels))
        scale = 1.0 if begun.scale is None else begun.scale
        counted = [(loss / scale, labels) for loss, labels in told if labels]
        if len(counted) == 1:
            return counted[0][0]
        return sum(loss * labels for loss, labels in counted) / sum(labels for _, labels in counted)

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
        parts = (self._nodes.rows_of(batch) for batch in self._data.held_out)
        # Evaluations do not count among the calls that key the random numbers of steps.
        calls = self._model.calls
        told = self._nodes.each(lambda: held_out_sum(self._model, (part for part in parts if part is not None)))
        self._model.calls = calls
        total, tokens = sum(loss for loss, _ in told), sum(count for _, count in told)
        assert self._observer is not None
        self._observer.on_evaluation(EvaluationRecord(step, total / tokens, tokens))
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
