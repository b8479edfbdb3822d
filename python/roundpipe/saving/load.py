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
from roundpipe.model.facade import ModelFacade, facade_in
from roundpipe.saving.capture import GRADIENTS, optimizer_kind
from roundpipe.saving.folders import wait_for_saves
from roundpipe.saving.fused import load_fused
from roundpipe.saving.names import ModelNames, names_of
from roundpipe.saving.random_states import restore_random_states
from roundpipe.saving.sampled import sampled_checksum
from roundpipe.saving.stored import StoredCheckpoint, candidates
from roundpipe.saving.torch_state import load_groups, load_torch
from roundpipe.saving.weights import WeightPlaces
from roundpipe.step.binding import as_schedulers
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
    A save into the folder that this process has under way is waited for.

    Args:
        folder: a checkpoint, or a run's folder: then its newest complete checkpoint. If that one is damaged, a message
            names the file, and the one before is loaded.
        model: the model in the pipeline.
        optimizer: the optimizer that steps it.
        lr_scheduler: as saved.
        scaler: as saved.
        state: objects with `load_state_dict`, by the names under which they were saved.
        weights_only: load weights and buffers, nothing else; a new training starts from them.
        strict: raise an error if the checkpoint lacks parameters or buffers of the model, or has others.

    Raises:
        ValueError: the checkpoint is of another model, optimizer or base; nothing has been changed.
        RoundPipeError: there is no complete checkpoint, or it is damaged. Damage of a large file is found when it has
            been read: do not use the model then.
    """
    _core.require_callers_thread()
    facade = facade_in(model)
    if facade is None:
        raise ValueError(f"[load_checkpoint] model is a {type(model).__name__}, expected one in the pipeline; wrap it")
    kind = None if weights_only else optimizer_kind(facade, optimizer)
    request = _Request(facade, optimizer, kind, as_schedulers(lr_scheduler), scaler, dict(state or {}), strict)
    if weights_only and (lr_scheduler is not None or scaler is not None or state):
        raise ValueError("[load_checkpoint] weights_only=True loads nothing but weights, expected no other objects")
    wait_for_saves(folder)
    damaged: list[str] = []
    for path in candidates(Path(folder)):
        try:
            stored = StoredCheckpoint(path)
            return _load(stored, request, weights_only)
        except _core.RoundPipeError as error:
            print(f"{error}", file=sys.stderr)
            damaged.append(str(error))
    raise _core.RoundPipeError(
        f"[load_checkpoint] {folder} has no checkpoint that is whole, expected step-N with all its files"
        + (f"; the newest one: {damaged[0]}" if damaged else "")
    )


@dataclass(frozen=True)
class _Request:
    model: ModelFacade
    optimizer: Any
    kind: str | None
    schedulers: Sequence[Any]
    scaler: GradScaler | None
    objects: dict[str, Any]
    strict: bool


def _load(stored: StoredCheckpoint, request: _Request, weights_only: bool) -> Loaded:
    model, group = request.model, request.model._step_group
    group.synchronize()
    if group.save is not None:
        group.save.wait_over()
    names = names_of(model)
    places = WeightPlaces(stored, names)
    _check(stored, request, names, places, weights_only)
    if weights_only:
        places.load_plain()
        if isinstance(group, FusedSteps):
            for parameter in names.parameters.values():
                if id(parameter) in group.binding.trained:
                    group.binding.restart_master(parameter)
            group.binding.core.accept_weights()
        return Loaded(stored.manifest.step, stored.folder, {}, places.missing, places.unexpected)
    objects = _decoded_objects(stored, request)
    if isinstance(group, FusedSteps):
        load_fused(stored, names, places, group, request.optimizer)
    else:
        assert isinstance(group, TorchSteps)
        load_torch(stored, names, places, group, request.optimizer)
    _load_gradients(stored, names, model)
    _load_run(stored, model)
    for scheduler, value in zip(request.schedulers, objects["lr_schedulers"], strict=True):
        scheduler.load_state_dict(value)
    if request.scaler is not None:
        saved = stored.value(stored.state["scaler"], "scaler")
        request.scaler.load_state_dict(saved["state"])
        request.scaler.load_resume_state(saved["resume"])
    for name, taker in request.objects.items():
        taker.load_state_dict(objects["state"][name])
    restore_random_states(stored.value(stored.state["random"], "random"))
    return Loaded(stored.manifest.step, stored.folder, objects["state"], places.missing, places.unexpected)


def _check(
    stored: StoredCheckpoint, request: _Request, names: ModelNames, places: WeightPlaces, weights_only: bool
) -> None:
    """Raises ValueError for a checkpoint that does not fit, before anything is changed."""
    if request.strict and (places.missing or places.unexpected):
        raise ValueError(
            f"[load_checkpoint] {stored.folder} lacks {_some(places.missing)} of the model and has "
            f"{_some(places.unexpected)} that the model lacks, expected a checkpoint of this model; give strict=False "
            "to load what fits"
        )
    places.check_shapes()
    for name, checksum in stored.state["outside"].items():
        parameter = names.parameters.get(name)
        if parameter is not None and sampled_checksum(parameter) != checksum:
            raise ValueError(
                f"[load_checkpoint] the frozen parameter '{name}' has other values than when {stored.folder} was "
                "saved, expected the same base, which the checkpoint does not hold; load that base first"
            )
    if weights_only:
        return
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
        load_groups(stored, names, ours, check_only=True)
    kept = len(stored.state.get("lr_schedulers", []))
    if kept != len(request.schedulers):
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has {kept} learning-rate schedulers and {len(request.schedulers)} were "
            "given, expected as many"
        )
    if ("scaler" in stored.state) != (request.scaler is not None):
        has = "a scaler" if "scaler" in stored.state else "no scaler"
        raise ValueError(f"[load_checkpoint] {stored.folder} has {has}, expected scaler= to be given as at the save")
    absent = [name for name in request.objects if name not in stored.state["state"]]
    if absent:
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has no state {_some(absent)}, expected names of its own: "
            f"{_some(list(stored.state['state']))}"
        )


def _some(names: Sequence[str]) -> str:
    """At most four names, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:4]) or "nothing"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _decoded_objects(stored: StoredCheckpoint, request: _Request) -> dict[str, Any]:
    def decoded(entry: dict[str, Any], path: str) -> Any:
        return stored.value(next(iter(entry.values())), path)

    schedulers = stored.state.get("lr_schedulers", [])
    return {
        "lr_schedulers": [decoded(entry, f"lr_schedulers[{i}]") for i, entry in enumerate(schedulers)],
        "state": {name: decoded(entry, f"state.{name}") for name, entry in stored.state["state"].items()},
    }


def _load_gradients(stored: StoredCheckpoint, names: ModelNames, model: ModelFacade) -> None:
    """Replaces the gradients that no step has consumed by the checkpoint's."""
    entries = stored.tensors.get(GRADIENTS, {})
    values = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in entries.items()}
    stored.read({GRADIENTS: values})
    by_id = names.by_id()
    for pipeline in model._step_group.models.all_pipelines():
        blocks = pipeline.block_parameters()
        pipeline.load_gradients([[values.get(by_id[id(parameter)]) for parameter in block] for block in blocks])
    for name, parameter in model._step_group.models.host_parameters.items():
        if model._step_group.models.host_pipeline is None:
            parameter.grad = values.get(name)


def _load_run(stored: StoredCheckpoint, model: ModelFacade) -> None:
    """Restores counters and seeds, and the number of microbatches, which belongs to the bits."""
    model._step_group.steps = stored.state["steps"]
    for path, pipe in model._step_group.models.pipes():
        saved = stored.state["pipelines"].get(path)
        if saved is None:
            continue
        pipe._pipeline.calls = saved["calls"]
        pipe._pipeline.random_seed = saved["random_seed"]
        own = object.__getattribute__(pipe, "__dict__")
        before, number = own["_run_config"].num_microbatch, saved["num_microbatch"]
        if number is None or before == number:
            continue
        if before == "auto":
            own["_auto_microbatches"] = number
            continue
        own["_run_config"] = replace(own["_run_config"], num_microbatch=number)
        if (len(devices()) + 1 if before is None else before) != number:
            print(
                f"[load_checkpoint] num_microbatch of {own['_name']} is {number}, as in the checkpoint, so that "
                "results stay the same",
                file=sys.stderr,
            )
