"""Saves the complete state of a training, while the training goes on."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoints.saving.capture import capture_of
from roundpipe.checkpoints.saving.parts import require_own_optimizer
from roundpipe.checkpoints.saving.ranks import ranks_of_call, ranks_of_saves
from roundpipe.model.facade import ModelFacade, facade_in
from roundpipe.model.memory.budget import budget_of
from roundpipe.model.step.fused_optimizer import as_schedulers
from roundpipe.model.step.fused_steps import FusedSteps
from roundpipe.model.step.scaler import GradScaler


@dataclass(frozen=True)
class SaveReport:
    """What a save took.

    Attributes:
        bytes: written by this process.
        seconds: from the call to the complete checkpoint.
        caller_seconds: how long `save_checkpoint` kept its caller.
        longest_wait_seconds: the longest time that an update, or the caller at the next step, waited for the disk.
        waited_seconds: all of these waits together.
        held_bytes: the most memory that the save held beside the state itself.
    """

    bytes: int
    seconds: float
    caller_seconds: float
    longest_wait_seconds: float
    waited_seconds: float
    held_bytes: int


class Save:
    """A checkpoint that is being written, returned by `save_checkpoint`.

    Attributes:
        step: its step.
        folder: where it will be.
    """

    def __init__(self, work: _core.SaveWork) -> None:
        self._work = work
        self.step = work.step
        self.folder = work.folder

    @property
    def done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._work.done

    def wait(self) -> SaveReport:
        """Waits until the checkpoint is complete.

        Raises:
            RoundPipeError: it could not be written, or the steps that it was to hold have failed. Nothing of it is
                there then, and earlier checkpoints are as they were; unless only the disk's last sync failed, which
                the error says. An older checkpoint that cannot be removed is told on stderr, and is no error.
        """
        return SaveReport(*self._work.wait())

    def wait_read(self) -> None:
        """Returns when the state may change."""
        self._work.wait_read()

    def wait_over(self) -> None:
        """Waits until the save is over, whether it has failed or not."""
        self._work.wait_over()


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    lr_scheduler: Any = None,
    scaler: GradScaler | None = None,
    state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int = 0,
    snapshot_memory: str | int | None = None,
    overwrite: bool = False,
    wait: bool = False,
) -> Save:
    """Saves the complete state of a training as `folder/step-N`, while the training goes on.

    Call it after `model.step`, on every rank of a model that several nodes train, with one folder that all of them
    see. Weights are standard safetensors files that transformers (for adapters: peft) loads from
    the checkpoint's folder. A training that loads the checkpoint continues with the same bits. The checkpoint appears
    under its name only when it is complete. See docs/checkpoints.md.

    With a `roundpipe.optim` optimizer, nothing waits for the step under way. A block that is not written yet when the
    next step updates it is copied first, within `snapshot_memory`; when that is used up, updates wait for the disk.
    An earlier save that is still under way is waited for. What is given as `state` is copied.
    With a torch optimizer, the call waits for the step function that is running; if the state does not fit into
    `snapshot_memory`, the next step waits until it is written.

    Args:
        folder: the run's folder. One process at a time may write to it.
        model: the model in the pipeline.
        optimizer: the optimizer that steps it.
        step: the checkpoint's number; by default the number of steps that were made.
        lr_scheduler: a torch scheduler, or several.
        scaler: the `GradScaler` of the losses.
        state: more to save, by name: objects with `state_dict` (a data loader, `Batches`), or tensors, arrays, numbers,
            strings, bytes, lists, tuples and dicts.
        keep_last: remove older complete checkpoints than this many, when the new one is complete; None keeps all.
        keep_every: of these, keep those whose step is a multiple of this.
        snapshot_memory: how much the save may hold beside the state, such as "8GB"; by default what the model's host
            budget leaves or half of the free memory, and at least two blocks.
        overwrite: a checkpoint of this step may be there, and is replaced.
        wait: return when the checkpoint is complete, and raise its errors.

    Returns:
        The save, with `wait()` and `done`. If it fails and nobody waits, a message is printed and training goes on.

    Raises:
        ValueError: an argument does not fit, or a value cannot be saved without pickle; nothing has been written.
        RoundPipeError: another process writes to the folder, or it cannot be written to.
    """
    began = time.perf_counter()
    _core.require_callers_thread()
    facade = facade_in(model)
    if facade is None:
        raise ValueError(f"[save_checkpoint] model is a {type(model).__name__}, expected one in the pipeline; wrap it")
    group = facade._step_group
    ranks = ranks_of_call(facade, "saves")
    taken: list[tuple[_core.Capture, _core.SnapshotMemory]] = []
    path = os.fspath(folder)

    def take() -> tuple[int, dict[str, int]]:
        require_own_optimizer(facade, optimizer)
        number = group.steps if step is None else step
        _check(number, keep_last, keep_every, scaler)
        schedulers = as_schedulers(lr_scheduler)
        _tell_left_out(group.schedulers, [*schedulers, *(state or {}).values()])
        limit = budget_of(snapshot_memory, "snapshot_memory", "ROUNDPIPE_SNAPSHOT_MEMORY")
        if ranks.rank == 0:
            _core.run_folder(path)
        _finish_earlier(group)
        if not isinstance(group, FusedSteps):
            group.finish_update()
        memory = _core.SnapshotMemory(_default_memory(facade) if limit is None else limit)
        capture = capture_of(
            facade,
            optimizer,
            number,
            ranks,
            schedulers=schedulers,
            objects=dict(state or {}),
            scaler=scaler,
            memory=memory,
        )
        taken.append((capture, memory))
        return number, capture.buffer_fingerprints() if ranks.size > 1 else {}

    try:
        told = ranks.agree(take)
        capture, memory = taken[0]
        if ranks.rank > 0:
            capture.leave_out_buffers(told[0][1])
        numbers = [number for number, _ in told]
        if len(set(numbers)) > 1:
            raise ValueError(f"[save_checkpoint] the ranks save as steps {numbers}, expected the same step on all")
        work = _core.SaveWork(
            _core.real_path(path),
            _core.run_folder(path) if ranks.rank == 0 else None,
            capture,
            memory,
            step=numbers[0],
            overwrite=overwrite,
            keep_last=keep_last,
            keep_every=keep_every,
            is_loud=not wait,
            agree=ranks_of_saves(facade).agree if ranks.size > 1 else None,
        )
        save = Save(work)
        if not isinstance(group, FusedSteps):
            if memory.try_take(capture.plain_bytes()):
                capture.copy_plain()
            else:
                group.keep_for(save)
        group.save = save
        work.start(capture, time.perf_counter() - began)
        # A process that ends waits for its threads, before the engine and torch.distributed end.
        threading.Thread(target=work.wait_over, name="roundpipe-save", daemon=False).start()
    except BaseException:
        for capture, _ in taken:
            capture.cancel()
        raise
    if wait:
        save.wait()
    return save


def _tell_left_out(moved: Sequence[Any], saved: Sequence[Any]) -> None:
    """Warns of a scheduler that steps move and that is not saved, neither itself nor as its state."""
    if any(isinstance(value, Mapping) and "last_epoch" in value for value in saved):
        return
    for scheduler in moved:
        if not any(scheduler is given for given in saved):
            warnings.warn(
                f"[save_checkpoint] steps move a {type(scheduler).__name__} that is not saved, expected it as "
                "lr_scheduler: a training that loads the checkpoint would begin its schedule anew",
                stacklevel=2,
            )


def _check(step: int, keep_last: int | None, keep_every: int, scaler: Any) -> None:
    for name, value in (("step", step), ("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"[save_checkpoint] {name} is {value!r}, expected an integer")
    _core.check_save(step, keep_last, keep_every)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(f"[save_checkpoint] scaler is a {type(scaler).__name__}, expected a roundpipe.GradScaler")


def _finish_earlier(group: Any) -> None:
    if group.save is not None:
        group.save.wait_over()
        group.save = None


def _default_memory(model: ModelFacade) -> int:
    budget = object.__getattribute__(model, "__dict__").get("_host_budget")
    return _core.default_snapshot_bytes(model._step_group.models.all_pipelines(), budget)
