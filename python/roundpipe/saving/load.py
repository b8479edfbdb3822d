"""Loads a checkpoint into a model, its optimizer and everything else of a training."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.device.pool import devices
from roundpipe.distributed.ranks import Ranks
from roundpipe.model.facade import ModelFacade, facade_in
from roundpipe.saving.capture import arithmetic_of, chunk_logit_bytes, optimizer_kind
from roundpipe.saving.names import ModelNames, names_of
from roundpipe.saving.own_state import OwnState
from roundpipe.saving.prepared import Prepared, prepared
from roundpipe.saving.ranks import ranks_of_call
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.saving.torch_state import load_torch
from roundpipe.step.fused_optimizer import as_schedulers
from roundpipe.step.fused_steps import FusedSteps
from roundpipe.step.scaler import GradScaler
from roundpipe.step.torch_steps import TorchSteps


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: the checkpoint's step.
        folder: the checkpoint's folder.
        state: the values that were saved as `state=`, by name; of objects, their state dicts.
        missing: parameters and buffers of the model that the checkpoint lacks (only with `strict=False`).
        unexpected: those of the checkpoint that the model lacks.
    """

    step: int
    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr_scheduler: Any = None,
    scaler: GradScaler | None = None,
    state: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    strict: bool = True,
) -> Loaded:
    """Loads what `save_checkpoint` has saved, so that the training continues with the same bits.

    Make model, optimizer, schedulers and scaler as at the start of the training, then load. Devices, plans, budgets
    and the weights' dtype may be others than at the save. The number of microbatches is the checkpoint's, since it
    belongs to the bits; a message says so if it differs. Files are read once, straight into the model, and verified.
    A save into the folder that this process has under way is waited for. Every rank of a model that several nodes train
    calls it, and reads its own part of the optimizer's state, whatever the number of nodes at the save was; see
    docs/several-machines-checkpoints.md.

    Args:
        folder: a checkpoint, or a run's folder: then its newest checkpoint. If that one is damaged in any way, the one
            before is loaded, and a line on stderr names the file and says how many steps are lost.
        model: the model in the pipeline.
        optimizer: the optimizer that steps it.
        lr_scheduler: as saved.
        scaler: as saved.
        state: objects with `load_state_dict`, by the names under which they were saved.
        weights_only: load weights and buffers, nothing else; a new training starts from them.
        strict: raise an error if the checkpoint lacks parameters or buffers of the model, or has others; or if it is of
            another number of nodes, which had values of `state` that differed between them.

    Raises:
        ValueError: the checkpoint is of another model, optimizer or base, or has gradients of another number of nodes;
            nothing has been changed.
        RoundPipeError: there is no checkpoint that is whole, or a scheduler cannot take its state. Damage of a large
            file is found when it has been read: do not use the model then.
        Exception: whatever earlier work of the model raised; then nothing was loaded.
    """
    _core.require_callers_thread()
    facade = facade_in(model)
    if facade is None:
        raise ValueError(f"[load_checkpoint] model is a {type(model).__name__}, expected one in the pipeline; wrap it")
    ranks = ranks_of_call(facade, "loads a checkpoint into")
    requests: list[_Request] = []

    def find() -> None:
        kind = None if weights_only else optimizer_kind(facade, optimizer)
        if weights_only and (lr_scheduler is not None or scaler is not None or state):
            raise ValueError("[load_checkpoint] weights_only=True loads nothing but weights, expected no other objects")
        schedulers = as_schedulers(lr_scheduler)
        requests.append(
            _Request(facade, optimizer, kind, schedulers, scaler, dict(state or {}), strict, weights_only, ranks)
        )
        _core.wait_for_saves(os.fspath(folder))

    ranks.agree(find)
    # The first rank's choice counts: a checkpoint may be pruned meanwhile.
    fall_back = _core.FallBack(os.fspath(folder)) if ranks.rank == 0 else None
    while True:
        name = ranks.agree(lambda: _next(fall_back, folder))[0]
        try:
            return _load_together(Path(folder) / name, requests[0])
        except _core.DamagedCheckpointError as error:
            if fall_back is not None:
                fall_back.damaged(str(error))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in a run folder; None if there is none. Reads only manifests.

    Raises:
        RoundPipeError: there are checkpoints, and none is complete: a training that began anew beside them would lose
            them.
    """
    found = _core.latest(os.fspath(folder))
    return None if found is None else Path(found)


def _next(fall_back: _core.FallBack | None, folder: str | os.PathLike[str]) -> str:
    """The path within `folder` of the checkpoint to try now, on the first rank; tells what was passed over."""
    if fall_back is None:
        return ""
    path, lines = fall_back.next()
    for line in lines:
        print(line, file=sys.stderr)
    return os.path.relpath(path, folder)


@dataclass(frozen=True)
class _Request:
    model: ModelFacade
    optimizer: Any
    kind: str | None
    schedulers: Sequence[Any]
    scaler: GradScaler | None
    objects: dict[str, Any]
    strict: bool
    weights_only: bool
    ranks: Ranks


@dataclass(frozen=True)
class _Opened:
    """`own` and `values` are those of a whole training; None for weights alone."""

    stored: StoredCheckpoint
    names: ModelNames
    places: _core.WeightPlaces
    own: OwnState | None
    values: Prepared | None


def _load_together(path: Path, request: _Request) -> Loaded:
    """Opens a checkpoint, and loads it if it fits on every rank."""
    opened: list[_Opened] = []
    loaded: list[Loaded] = []
    request.ranks.agree(lambda: opened.append(_open(path, request)))
    request.ranks.agree(lambda: loaded.append(_load(opened[0], request)))
    return loaded[0]


def _open(path: Path, request: _Request) -> _Opened:
    group = request.model._step_group
    # First: what earlier work raises says nothing about the checkpoint.
    group.synchronize()
    if group.save is not None:
        group.save.wait_over()
    stored = StoredCheckpoint(path, request.weights_only)
    names = names_of(request.model)
    core_names = names.core()
    places = _core.WeightPlaces(stored.core, core_names)
    if request.weights_only:
        places.check(core_names, request.strict)
        return _Opened(stored, names, places, None, None)
    with stored.as_damage():
        own = OwnState(stored, request.ranks.rank, request.ranks.size)
        places.check(core_names, request.strict)
        _check(stored, request, own)
        # Everything that may not fit is read before anything is changed.
        values = prepared(stored, own, names, request.optimizer, request.schedulers, request.scaler)
    return _Opened(stored, names, places, own, values)


def _load(opened: _Opened, request: _Request) -> Loaded:
    stored, own, values, names, places = opened.stored, opened.own, opened.values, opened.names, opened.places
    model, group, ranks = request.model, request.model._step_group, request.ranks
    if own is None or values is None:
        places.load()
        stored.core.verify_rest(ranks.rank, ranks.size)
        if isinstance(group, FusedSteps):
            for parameter in names.parameters.values():
                if group.binding.trains(parameter):
                    group.binding.restart_master(parameter)
            group.binding.accept_weights()
        return Loaded(stored.manifest.step, stored.folder, {}, tuple(places.missing), tuple(places.unexpected))
    if isinstance(group, FusedSteps):
        optimizer = request.optimizer
        for ours, options in zip(optimizer.param_groups, values.groups, strict=True):
            ours.update(options)
        _core.load_fused(
            stored.core,
            names.core(),
            places,
            group.binding,
            optimizer.algorithm,
            optimizer.core_format,
            optimizer.core_groups(),
            is_shared=ranks.size > 1,
        )
    else:
        assert isinstance(group, TorchSteps)
        load_torch(stored, names, places, group, request.optimizer, values)
    _load_own_buffers(stored, own, names)
    _load_gradients(stored, own, names, model)
    stored.core.verify_rest(ranks.rank, ranks.size)
    _load_run(stored, own, model)
    for scheduler, value in zip(request.schedulers, values.schedules, strict=True):
        try:
            scheduler.load_state_dict(value)
        except Exception as error:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {type(scheduler).__name__} cannot take its state in {stored.folder} "
                f"({type(error).__name__}: {error}), expected the state of a scheduler made like it; the model and the "
                "optimizer have been loaded"
            ) from error
    if request.scaler is not None:
        request.scaler.load_state_dict(values.scaler["state"])
        request.scaler.load_resume_state(values.scaler["resume"])
    for name, taker in request.objects.items():
        if name in values.state:
            taker.load_state_dict(values.state[name])
    own.restore_random_states(values.random)
    return Loaded(stored.manifest.step, stored.folder, values.state, tuple(places.missing), tuple(places.unexpected))


def _check(stored: StoredCheckpoint, request: _Request, own: OwnState) -> None:
    """Raises ValueError for a training that does not fit, before anything is changed."""
    saved = stored.state.get("optimizer")
    ours = request.optimizer
    if (saved is None) != (ours is None):
        have, give = ("no optimizer", "none") if saved is None else (saved["class"], "the one that steps the model")
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has {have}, expected {give} as the third argument; or give "
            "weights_only=True to start anew from its weights"
        )
    if saved is not None:
        moments = ours.format_name if request.kind == "fused" else "torch"
        if (saved["class"], saved["moments"]) != (type(ours).__name__, moments):
            raise ValueError(
                f"[load_checkpoint] {stored.folder} has the state of {saved['class']} with moments "
                f"{saved['moments']!r}, expected {type(ours).__name__} with {moments!r}; make the optimizer as it was, "
                "or give weights_only=True"
            )
    kept = len(stored.state.get("lr_schedulers", []))
    if kept != len(request.schedulers):
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has {kept} learning-rate schedulers and {len(request.schedulers)} were "
            "given, expected as many"
        )
    if ("scaler" in stored.state) != (request.scaler is not None):
        has = "a scaler" if "scaler" in stored.state else "no scaler"
        raise ValueError(f"[load_checkpoint] {stored.folder} has {has}, expected scaler= to be given as at the save")
    own.check(request.strict)
    absent = [name for name in request.objects if name not in own.values and name not in own.differing]
    if absent:
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has no state {_some(absent)}, expected names of its own: "
            f"{_some(list(own.values))}"
        )


def _some(names: Sequence[str]) -> str:
    """At most four names, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:4]) or "nothing"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _load_own_buffers(stored: StoredCheckpoint, own: OwnState, names: ModelNames) -> None:
    """Loads the buffers that this rank had with other values than the first one."""
    buffers = {names.file_name(name): buffer for name, buffer in names.buffers.items()}
    stored.read_files((entry.file, name, buffers[name]) for name, entry in own.buffers.items() if name in buffers)


def _load_gradients(stored: StoredCheckpoint, own: OwnState, names: ModelNames, model: ModelFacade) -> None:
    """Replaces the gradients that no step has consumed by the checkpoint's."""
    values = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in own.gradients.items()}
    stored.read_files((entry.file, name, values[name]) for name, entry in own.gradients.items())
    by_id = names.by_id()
    for pipeline in model._step_group.models.all_pipelines():
        blocks = pipeline.block_parameters()
        pipeline.load_gradients([[values.get(by_id[id(parameter)]) for parameter in block] for block in blocks])
    for name, parameter in model._step_group.models.host_parameters.items():
        if model._step_group.models.host_pipeline is None:
            parameter.grad = values.get(name)


def _load_run(stored: StoredCheckpoint, own: OwnState, model: ModelFacade) -> None:
    """Restores counters and seeds, and the number of microbatches, which belongs to the bits."""
    group = model._step_group
    group.steps = stored.state["steps"]
    added_in_fp16 = stored.state.get("fp16_accumulation", False)
    if changed := _core.changed_fp16_accumulation(added_in_fp16, devices().fp16_accumulation):
        print(changed, file=sys.stderr)
    if group.joint is not None:
        group.joint.counts.load(own.loss_counts)
    for path, pipe in group.models.pipes():
        saved = own.pipelines.get(path)
        if saved is None:
            continue
        pipe._pipeline.calls = saved["calls"]
        pipe._pipeline.random_seed = own.seed(path)
        attributes = object.__getattribute__(pipe, "__dict__")
        _keep_chunks(pipe, saved)
        _say_changed_arithmetic(pipe, saved)
        before, number = attributes["_run_config"].num_microbatch, saved["num_microbatch"]
        if number is None or before == number:
            continue
        if before == "auto":
            attributes["_auto_microbatches"] = number
            continue
        attributes["_run_config"] = replace(attributes["_run_config"], num_microbatch=number)
        if (len(devices()) + 1 if before is None else before) != number:
            print(
                f"[load_checkpoint] num_microbatch of {attributes['_name']} is {number}, as in the checkpoint, so that "
                "results stay the same",
                file=sys.stderr,
            )


def _say_changed_arithmetic(pipe: Any, saved: Mapping[str, Any]) -> None:
    own = arithmetic_of(pipe)
    said = None if own is None else _core.changed_arithmetic(saved.get("arithmetic"), own, pipe._name)
    if said:
        print(said, file=sys.stderr)


def _keep_chunks(pipe: Any, saved: Mapping[str, Any]) -> None:
    """Losses go on in chunks of the size that they had."""
    name = "chunk_logit_bytes"
    kept = _core.kept_chunks(name in saved, saved.get(name), chunk_logit_bytes(pipe), pipe._name)
    if kept is None:
        return
    number, notice = kept
    pipe._language_model.keep_chunk_logit_bytes(number)
    print(notice, file=sys.stderr)
