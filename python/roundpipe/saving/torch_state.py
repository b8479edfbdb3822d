"""Loads the state of torch's optimizers."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.saving.capture import OPTIMIZER, PREVIOUS
from roundpipe.saving.names import ModelNames
from roundpipe.saving.prepared import Prepared
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.step.torch_steps import TorchSteps


def load_torch(
    stored: StoredCheckpoint,
    names: ModelNames,
    places: _core.WeightPlaces,
    group: TorchSteps,
    optimizer: Any,
    values: Prepared,
) -> None:
    """Loads a model whose steps torch's optimizer makes. REQUIRES: nothing runs."""
    previous = stored.tensors.get(PREVIOUS, {})
    kept = stored.tensors.get(OPTIMIZER, {})
    own: dict[str, torch.Tensor] = {}
    in_copies: dict[str, torch.Tensor] = {}
    from_weights: list[tuple[torch.Tensor, torch.Tensor]] = []  # programs in C++ have no copies
    for name, parameter in names.parameters.items():
        copy = group.copy_of(parameter)
        if copy is None:
            continue
        if f"{name}/copy" not in kept:
            copy.landed_grad = None
            from_weights.append((copy.detach(), parameter.detach()))
        else:
            in_copies[f"{name}/copy"] = copy.detach()
            if name in previous:
                own[name] = parameter.detach()
            if f"{name}/copy_grad" in kept:
                copy.landed_grad = torch.empty_like(copy)
                in_copies[f"{name}/copy_grad"] = copy.landed_grad
            else:
                copy.landed_grad = None
    places.load(own.keys() & places.sources.keys(), {PREVIOUS: list(own.items()), OPTIMIZER: list(in_copies.items())})
    for weights, loaded in from_weights:
        weights.copy_(loaded)
    group.accept_loaded(unpublished=bool(own))
    if optimizer is None:
        return
    groups, index = [], 0
    for options, saved in zip(optimizer.param_groups, values.groups, strict=True):
        options.update(saved)
        packed = {key: value for key, value in options.items() if key != "params"}
        packed["params"] = list(range(index, index + len(options["params"])))
        index += len(options["params"])
        groups.append(packed)
    optimizer.load_state_dict({"state": values.optimizer, "param_groups": groups})
