"""What a save takes of a training, on the caller's thread."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoints.saving.names import adapter_of, names_of
from roundpipe.checkpoints.saving.parts import fused_of, models_of, optimizer_of
from roundpipe.checkpoints.saving.random_states import random_states_of_python
from roundpipe.compatibility import package_version
from roundpipe.distributed.ranks import Ranks
from roundpipe.model.facade import ModelFacade
from roundpipe.model.published_attributes import source_of_names
from roundpipe.model.step.fused_steps import FusedSteps
from roundpipe.model.step.scaler import GradScaler
from roundpipe.model.step.torch_steps import TorchSteps


def capture_of(
    model: ModelFacade,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    ranks: Ranks,
    *,
    schedulers: Sequence[Any],
    objects: Mapping[str, Any],
    scaler: GradScaler | None,
    memory: _core.SnapshotMemory,
) -> _core.Capture:
    """Takes the state of a training at this moment, some of it still in motion. REQUIRES: no step function runs."""
    group = model._step_group
    models = models_of(model)
    capture = _core.Capture(
        names_of(model),
        models,
        step=step,
        steps=group.steps,
        versions=_versions(),
        other_random_states=random_states_of_python(),
        loss_counts=None if group.joint is None else json.dumps(group.joint.counts.state()),
        rank=ranks.rank,
        size=ranks.size,
    )
    for name, text in _configurations(source_of_names(model)).items():
        capture.add_file(name, text)
    capture.take_schedulers([_given(scheduler) for scheduler in schedulers])
    capture.take_values([(name, _given(value)) for name, value in objects.items()])
    if scaler is not None:
        capture.take_scaler(scaler.later_state())
    taken = None if optimizer is None else optimizer_of(model, optimizer, with_options=True)
    if isinstance(group, FusedSteps):
        assert taken is not None
        capture.take_fused(fused_of(optimizer), taken, memory)
    else:
        assert isinstance(group, TorchSteps)
        state = None if optimizer is None else optimizer.state_dict()["state"]
        capture.take_plain(models, group.core, taken, state)
    return capture


def _given(value: Any) -> tuple[Any, bool]:
    """The value or, of an object that has one, its state dict; and whether it is that."""
    return (value.state_dict(), True) if hasattr(value, "state_dict") else (value, False)


def _versions() -> list[tuple[str, str]]:
    found = {"roundpipe": package_version(), "torch": torch.__version__, "python": sys.version.split()[0]}
    for package in ("transformers", "peft"):
        if package in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return list(found.items())


def _configurations(source: Any) -> dict[str, str]:
    """The files by which transformers, or peft, recognises the folder."""
    adapter = adapter_of(source)
    if adapter is not None:
        config = source.peft_config[adapter].to_dict()
        config["inference_mode"] = True
        plain = {key: _plain(value) for key, value in config.items()}
        return {"adapter_config.json": json.dumps(plain, indent=2, sort_keys=True)}
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(source, transformers.PreTrainedModel):
        return {}
    config = source.config.to_diff_dict()
    config["architectures"] = [type(source).__name__]
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    files = {"config.json": json.dumps(config, indent=2, sort_keys=True)}
    if getattr(source, "generation_config", None) is not None:
        files["generation_config.json"] = source.generation_config.to_json_string()
    return files


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value
