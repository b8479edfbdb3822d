"""Loads the state of torch's optimizers, and the groups of any optimizer."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.saving.capture import OPTIMIZER, PREVIOUS
from roundpipe.saving.names import ModelNames
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.saving.weights import WeightPlaces
from roundpipe.step.torch_steps import TorchSteps


def load_groups(stored: StoredCheckpoint, names: ModelNames, optimizer: Any, check_only: bool = False) -> None:
    """Loads the options of an optimizer's groups.

    Raises:
        ValueError: the groups have other parameters than at the save.
    """
    saved = stored.state["optimizer"]["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has an optimizer of {len(saved)} groups, expected "
            f"{len(optimizer.param_groups)}; make the optimizer as it was"
        )
    by_id = names.by_id()
    for index, (group, ours) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        here = [by_id.get(id(parameter)) for parameter in ours["params"]]
        if len(here) != len(group["params"]) or any(
            a != b for a, b in zip(here, group["params"], strict=True) if a is not None and b is not None
        ):
            raise ValueError(
                f"[load_checkpoint] group {index} of the optimizer in {stored.folder} has other parameters than this "
                "one, expected the same in the same order; make the optimizer as it was"
            )
        if not check_only:
            ours.update(stored.value(group["options"], f"optimizer.param_groups[{index}]"))


def load_torch(
    stored: StoredCheckpoint, names: ModelNames, places: WeightPlaces, group: TorchSteps, optimizer: Any
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
    places.load_plain(except_for=own.keys() & places.sources.keys(), beside={PREVIOUS: own, OPTIMIZER: in_copies})
    for weights, loaded in from_weights:
        weights.copy_(loaded)
    group.accept_loaded(unpublished=bool(own))
    if optimizer is None:
        return
    state = stored.value(stored.state["optimizer"]["state_dict"], "optimizer")
    load_groups(stored, names, optimizer)
    groups, index = [], 0
    for options in optimizer.param_groups:
        packed = {key: value for key, value in options.items() if key != "params"}
        packed["params"] = list(range(index, index + len(options["params"])))
        index += len(options["params"])
        groups.append(packed)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
