"""Loads a checkpoint into a model, its optimizer and everything else of a training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoints.saving.names import names_of
from roundpipe.checkpoints.saving.parts import fused_of, models_of, optimizer_of, require_own_optimizer
from roundpipe.checkpoints.saving.prepared import Prepared, prepared
from roundpipe.checkpoints.saving.random_states import derive_random_states, derived_seed, restore_random_states
from roundpipe.checkpoints.saving.ranks import ranks_of_call
from roundpipe.checkpoints.saving.stored import as_damage
from roundpipe.distributed.ranks import Ranks
from roundpipe.model.facade import ModelFacade, facade_in
from roundpipe.model.step.fused_optimizer import as_schedulers
from roundpipe.model.step.fused_steps import FusedSteps
from roundpipe.model.step.scaler import GradScaler
from roundpipe.model.step.torch_steps import TorchSteps


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
    docs/checkpoints.md.

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
        if not weights_only:
            require_own_optimizer(facade, optimizer)
        if weights_only and (lr_scheduler is not None or scaler is not None or state):
            raise ValueError("[load_checkpoint] weights_only=True loads nothing but weights, expected no other objects")
        schedulers = as_schedulers(lr_scheduler)
        requests.append(_Request(facade, optimizer, schedulers, scaler, dict(state or {}), strict, weights_only, ranks))
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
    schedulers: Sequence[Any]
    scaler: GradScaler | None
    objects: dict[str, Any]
    strict: bool
    weights_only: bool
    ranks: Ranks


def _load_together(path: Path, request: _Request) -> Loaded:
    """Opens a checkpoint, and loads it if it fits on every rank."""
    opened: list[tuple[_core.TrainingLoad, Prepared | None]] = []
    loaded: list[Loaded] = []
    request.ranks.agree(lambda: opened.append(_open(path, request)))
    request.ranks.agree(lambda: loaded.append(_load(path, *opened[0], request)))
    return loaded[0]


def _open(path: Path, request: _Request) -> tuple[_core.TrainingLoad, Prepared | None]:
    group, optimizer = request.model._step_group, request.optimizer
    # First: what earlier work raises says nothing about the checkpoint.
    group.synchronize()
    if group.save is not None:
        group.save.wait_over()
    scaler = request.scaler
    load = _core.TrainingLoad(
        str(path),
        names_of(request.model),
        models_of(request.model, auto_is_open=True),
        group.models.all_pipelines(),
        None
        if optimizer is None or request.weights_only
        else optimizer_of(request.model, optimizer, with_options=False),
        is_fused=isinstance(group, FusedSteps),
        schedules=len(request.schedulers),
        has_scaler=scaler is not None,
        scales=scaler is not None and scaler.is_enabled(),
        takers=list(request.objects),
        rank=request.ranks.rank,
        size=request.ranks.size,
        strict=request.strict,
        weights_only=request.weights_only,
    )
    if request.weights_only:
        return load, None
    # Everything that may not fit is read before anything is changed.
    with as_damage(path):
        return load, prepared(load, optimizer, request.schedulers)


def _load(path: Path, load: _core.TrainingLoad, values: Prepared | None, request: _Request) -> Loaded:
    group, optimizer = request.model._step_group, request.optimizer
    missing, unexpected = tuple(load.missing), tuple(load.unexpected)
    if values is None:
        load.load_weights(group.binding if isinstance(group, FusedSteps) else None)
        return Loaded(load.step, path, {}, missing, unexpected)
    if isinstance(group, FusedSteps):
        for ours, options in zip(optimizer.param_groups, values.groups, strict=True):
            ours.update(options)
        load.load_fused(fused_of(optimizer))
    else:
        assert isinstance(group, TorchSteps)
        load.load_copies(group.core)
        if optimizer is not None:
            _load_optimizer(optimizer, values)
    _load_rest(load, request.model, request.ranks.rank)
    for scheduler, value in zip(request.schedulers, values.schedules, strict=True):
        try:
            scheduler.load_state_dict(value)
        except Exception as error:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {type(scheduler).__name__} cannot take its state in {path} "
                f"({type(error).__name__}: {error}), expected the state of a scheduler made like it; the model and the "
                "optimizer have been loaded"
            ) from error
    if request.scaler is not None:
        request.scaler.load_state_dict(values.scaler["state"])
        request.scaler.load_resume_state(values.scaler["resume"])
    for name, taker in request.objects.items():
        if name in values.state:
            taker.load_state_dict(values.state[name])
    if load.has_random_states:
        load.restore_random_states()
        restore_random_states(values.random)
    else:
        derive_random_states(values.random, request.ranks.rank)
        ranks = "1 rank" if load.nodes == 1 else f"{load.nodes} ranks"
        print(
            f"[load_checkpoint] {path} was saved by {ranks}; rank {request.ranks.rank} has random states that are "
            "derived from those of rank 0",
            file=sys.stderr,
        )
    return Loaded(load.step, path, values.state, missing, unexpected)


def _load_optimizer(optimizer: torch.optim.Optimizer, values: Prepared) -> None:
    """Gives torch's optimizer its options and its state."""
    groups, index = [], 0
    for options, saved in zip(optimizer.param_groups, values.groups, strict=True):
        options.update(saved)
        packed = {key: value for key, value in options.items() if key != "params"}
        packed["params"] = list(range(index, index + len(options["params"])))
        index += len(options["params"])
        groups.append(packed)
    optimizer.load_state_dict({"state": values.optimizer, "param_groups": groups})


def _load_rest(load: _core.TrainingLoad, model: ModelFacade, rank: int) -> None:
    """Loads what is left in files, counters and seeds, and the number of microbatches, which belongs to the bits."""
    group = model._step_group
    models, lines = load.load_rest()
    for line in lines:
        print(line, file=sys.stderr)
    group.steps = load.steps
    if group.joint is not None:
        group.joint.counts.load(json.loads(load.loss_counts()))
    for (_, pipe), loaded in zip(group.models.pipes(), models, strict=True):
        attributes = object.__getattribute__(pipe, "__dict__")
        if loaded.seed_is_another_s:
            pipe._pipeline.random_seed = derived_seed(pipe._pipeline.random_seed.to_bytes(8, "little"), rank)
        if loaded.chunk_logit_bytes is not None:
            attributes["_language_model"].keep_chunk_logit_bytes(loaded.chunk_logit_bytes)
        if loaded.microbatches is None:
            continue
        if attributes["_run_config"].num_microbatch == "auto":
            attributes["_auto_microbatches"] = loaded.microbatches
        else:
            attributes["_run_config"] = replace(attributes["_run_config"], num_microbatch=loaded.microbatches)
