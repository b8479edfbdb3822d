"""Saves the complete state of a training, while the training goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe import _core
from roundpipe.distributed.ranks import Ranks
from roundpipe.memory.budget import budget_of
from roundpipe.memory.host import free_host_bytes, host_arena
from roundpipe.model.facade import ModelFacade, facade_in
from roundpipe.saving import capture as captured
from roundpipe.saving.capture import Capture, Item
from roundpipe.saving.folders import note_save, run_folder
from roundpipe.saving.layout import File, files_of, texts_of
from roundpipe.saving.ranks import ranks_of_call, ranks_of_saves
from roundpipe.step.binding import as_schedulers
from roundpipe.step.fused_steps import FusedSteps
from roundpipe.step.scaler import GradScaler

_THREADS = 2


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

    def __init__(
        self,
        run: _core.RunFolder | None,
        path: str,
        capture: Capture,
        memory: _core.SnapshotMemory,
        ranks: Ranks,
        options: _Options,
    ) -> None:
        self.step = options.step
        self.folder = os.path.join(path, f"step-{options.step}")
        self._run, self._capture, self._memory, self._options = run, capture, memory, options
        self._ranks = ranks
        self._files: list[File] = []
        self._texts: dict[str, str] = {}
        self._writer: _core.StepWriter | None = None  # of the first rank
        self._began = time.perf_counter()
        self._read = _core.Event()
        self._over = _core.Event()
        self._error: BaseException | None = None
        self._is_over = False
        self._placed: bool | None = False  # None: the first rank knows
        self._bytes = 0
        self._seconds = 0.0
        self._caller_seconds = 0.0
        # Not a daemon: a process that ends finishes its save first.
        self._thread = threading.Thread(target=self._work, name="roundpipe-save", daemon=False)

    @property
    def done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._is_over

    def wait(self) -> SaveReport:
        """Waits until the checkpoint is complete.

        Raises:
            RoundPipeError: it could not be written, or the steps that it was to hold have failed. Nothing of it is
                there then, and earlier checkpoints are as they were; unless only the disk's last sync failed, which
                the error says. An older checkpoint that cannot be removed is told on stderr, and is no error.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        memory = self._memory
        return SaveReport(
            self._bytes,
            self._seconds,
            self._caller_seconds,
            memory.longest_wait_ms / 1000,
            memory.total_wait_ms / 1000,
            memory.most_bytes,
        )

    def wait_read(self) -> None:
        """Returns when the state may change."""
        began = time.perf_counter()
        self._read.wait()
        self._memory.note_wait(1000 * (time.perf_counter() - began))

    def wait_over(self) -> None:
        """Waits until the save is over, whether it has failed or not."""
        self._over.wait()

    def _start(self, began: float) -> None:
        self._began = began
        self._thread.start()
        self._caller_seconds = time.perf_counter() - began

    def _work(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            traceback.clear_frames(error.__traceback__)  # they hold the writer, which removes what it has written
            if self._options.is_loud:
                print(_core.failed_save_notice(self.step, str(error), self._placed), file=sys.stderr)
        finally:
            if self._capture.snapshot is not None:
                self._capture.snapshot.cancel()
            del self._capture, self._files, self._texts, self._writer, self._ranks
            self._seconds = time.perf_counter() - self._began
            self._is_over = True
            self._read.fire()
            self._over.fire()

    def _write(self) -> None:
        ranks = self._ranks
        prepared = ranks.agree(self._prepare)
        differing = [rank for rank, (_, digest) in enumerate(prepared) if digest != prepared[0][1]]
        if differing:
            raise _core.RoundPipeError(
                f"[save_checkpoint] the optimizer's options, schedulers, scaler or number of steps differ between rank "
                f"0 and rank {differing[0]}, expected the same on all ranks; give what differs as state="
            )
        total = sum(size for size, _ in prepared)
        place = ranks.agree(lambda: self._begin(total))[0]
        records = ranks.agree(lambda: self._write_files(place))
        self._placed = False if self._ranks.rank == 0 else None
        ranks.agree(lambda: self._commit(records))

    def _prepare(self) -> tuple[int, str]:
        """Lays out this rank's files. Returns their size, and a checksum of what all ranks have."""
        capture = self._capture
        capture.finish()
        self._files = list(files_of(capture))
        self._texts = texts_of(capture, self._files)
        self._bytes = sum(file.layout.file_bytes for file in self._files) + sum(map(len, self._texts.values()))
        return self._bytes, capture.common_digest() if self._ranks.size > 1 else ""

    def _begin(self, total_bytes: int) -> str:
        """Makes the hidden folder, on the first rank. Returns its name in the run's folder."""
        if self._run is None:
            return ""
        self._writer = self._run.begin(self.step, total_bytes=total_bytes, replace=self._options.overwrite)
        return os.path.basename(self._writer.folder)

    def _write_files(self, place: str) -> list[tuple[str, int, int]]:
        """Writes this rank's files into the hidden folder. Returns those that the first rank did not write."""
        capture, ranks = self._capture, self._ranks
        writer: _core.StepWriter | _core.StepFiles | None = self._writer
        if writer is None:
            folder = os.path.join(os.path.dirname(self.folder), place)
            if not os.path.isdir(folder):
                raise _core.RoundPipeError(
                    f"[save_checkpoint] rank {ranks.rank} does not see {folder}, which rank 0 has made, expected one "
                    "folder that all ranks share; give one on a file system of the network"
                )
            writer = _core.StepFiles(folder)
        targets: dict[int, tuple[_core.OutputFile, int]] = {}
        plain: list[tuple[_core.OutputFile, int, Item]] = []
        for file in self._files:
            output = writer.create(file.name, file.layout.file_bytes)
            output.write_at(0, file.layout.header)
            for item, offset in zip(file.items, file.layout.offsets, strict=True):
                if item.piece is None:
                    plain.append((output, offset, item))
                else:
                    targets[item.piece] = (output, offset)
        if capture.snapshot is not None:
            capture.snapshot.write([targets[number] for number in range(len(targets))], _THREADS)
        for output, offset, item in plain:
            values = item.tensor if item.values is None else item.values.to(item.tensor.dtype)
            _core.write_tensor(output, offset, values)
        self._read.fire()
        for name, text in self._texts.items():
            writer.add_small(name, text)
        if isinstance(writer, _core.StepWriter):
            return []
        return [(record.name, record.bytes, record.crc32c) for record in writer.finish()]

    def _commit(self, records: list[list[tuple[str, int, int]]]) -> None:
        """Completes the checkpoint, on the first rank."""
        if self._writer is None or self._run is None:
            return
        for rank, files in enumerate(records):
            self._writer.adopt(files, f"rank {rank}")
        try:
            self._writer.commit(self._capture.state["versions"], self._ranks.size)
        finally:
            self._placed = self._writer.placed
        if self._options.keep_last is not None:
            pruned = self._run.prune(self._options.keep_last, self._options.keep_every, self.step)
            for notice in pruned.notices:
                print(f"[save_checkpoint] {notice}", file=sys.stderr)


@dataclass(frozen=True)
class _Options:
    step: int
    overwrite: bool
    keep_last: int | None
    keep_every: int
    is_loud: bool


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
    taken: list[tuple[Capture, _core.SnapshotMemory]] = []

    def take() -> tuple[int, dict[str, int]]:
        kind = captured.optimizer_kind(facade, optimizer)
        number = group.steps if step is None else step
        _check(number, keep_last, keep_every, scaler)
        schedulers = as_schedulers(lr_scheduler)
        limit = budget_of(snapshot_memory, "snapshot_memory", "ROUNDPIPE_SNAPSHOT_MEMORY")
        if ranks.rank == 0:
            run_folder(folder)
        _finish_earlier(group)
        if kind != "fused":
            group.finish_update()
        memory = _core.SnapshotMemory(_default_memory(facade) if limit is None else limit)
        capture = captured.begin(facade, number, ranks)
        taken.append((capture, memory))
        if schedulers:
            capture.take_schedulers(schedulers)
        capture.take_objects(dict(state or {}))
        if scaler is not None:
            capture.take_scaler(scaler)
        if isinstance(group, FusedSteps):
            capture.take_fused(group, optimizer, memory)
        else:
            capture.take_torch(group, optimizer)
        return number, capture.buffer_checksums() if ranks.size > 1 else {}

    try:
        told = ranks.agree(take)
        capture, memory = taken[0]
        if ranks.rank > 0:
            capture.leave_out_buffers(told[0][1])
        numbers = [number for number, _ in told]
        if len(set(numbers)) > 1:
            raise ValueError(f"[save_checkpoint] the ranks save as steps {numbers}, expected the same step on all")
        save = Save(
            run_folder(folder) if ranks.rank == 0 else None,
            os.path.realpath(folder),
            capture,
            memory,
            ranks_of_saves(facade),
            _Options(numbers[0], overwrite, keep_last, keep_every, is_loud=not wait),
        )
        if not isinstance(group, FusedSteps):
            if memory.try_take(sum(tensor.nbytes for tensor in capture.plain_tensors())):
                capture.copy_plain()
            else:
                group.keep_for(save)
        group.save = save
        note_save(os.path.realpath(folder), save)
        save._start(began)
    except BaseException:
        for capture, _ in taken:
            if capture.snapshot is not None:
                capture.snapshot.cancel()
        raise
    if wait:
        save.wait()
    return save


def _check(step: int, keep_last: int | None, keep_every: int, scaler: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 0)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"[save_checkpoint] {name} is {value!r}, expected an integer of at least {least}")
    if keep_every and keep_last is None:
        raise ValueError("[save_checkpoint] keep_every has no effect without keep_last, expected both; give keep_last")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(f"[save_checkpoint] scaler is a {type(scaler).__name__}, expected a roundpipe.GradScaler")


def _finish_earlier(group: Any) -> None:
    if group.save is not None:
        group.save.wait_over()
        group.save = None


def _default_memory(model: ModelFacade) -> int:
    """What the host's budget leaves, or half of the free memory; at least two blocks with moments in fp32."""
    blocks = [block for pipeline in model._step_group.models.all_pipelines() for block in pipeline.block_parameters()]
    largest = max((sum(p.nbytes + 12 * p.numel() for p in block) for block in blocks), default=0)
    budget = object.__getattribute__(model, "__dict__").get("_host_budget")
    left = free_host_bytes() // 2 if budget is None else budget - host_arena().asked_bytes
    return max(left, 2 * largest)
