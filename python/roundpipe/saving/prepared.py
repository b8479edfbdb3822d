"""What a checkpoint holds beside tensors of the model, decoded and compared with what takes it, before it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.saving.names import ModelNames
from roundpipe.saving.own_state import OwnState
from roundpipe.saving.random_states import check_random_states
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.step.fused_optimizer import BoundOptimizer
from roundpipe.step.scaler import GradScaler


@dataclass(frozen=True)
class Prepared:
    """Values of a training.

    Attributes:
        groups: the options of the optimizer's groups.
        optimizer: the state of an optimizer of torch, by the number of the parameter; {} for a fused one.
        schedules: the states of the learning-rate schedulers.
        scaler: its state and how it goes on; {} without one.
        state: what the program has given, by name.
        random: the states of the random number generators.
    """

    groups: list[dict[str, Any]]
    optimizer: dict[Any, Any]
    schedules: list[Any]
    scaler: dict[str, Any]
    state: dict[str, Any]
    random: dict[str, Any]


def prepared(
    stored: StoredCheckpoint,
    own: OwnState,
    names: ModelNames,
    optimizer: Any,
    schedulers: Sequence[Any],
    scaler: GradScaler | None,
) -> Prepared:
    """Decodes all of it.

    Raises:
        ValueError: it is of an optimizer with other groups, or of a scaler that was disabled.
        Exception: a value is not of the kind that its taker has; anything, with `StoredCheckpoint.as_damage` around.
    """
    state = stored.state
    groups = [] if optimizer is None else _groups(stored, names, optimizer)
    of_torch: dict[Any, Any] = {}
    if optimizer is not None and "state_dict" in state["optimizer"]:
        of_torch = stored.value("optimizer", "state_dict", path="optimizer")
    saved = state.get("lr_schedulers", [])
    schedules = [
        stored.value("lr_schedulers", i, next(iter(each)), path=f"lr_schedulers[{i}]") for i, each in enumerate(saved)
    ]
    for scheduler, value in zip(schedulers, schedules, strict=True):
        _require_alike(_present(value, "lr_schedulers"), scheduler.state_dict(), "lr_schedulers")
    of_scaler = {} if scaler is None else stored.value("scaler", path="scaler")
    if scaler is not None and scaler.is_enabled() and not of_scaler["state"]:
        raise ValueError(
            f"[load_checkpoint] {stored.folder} was saved with a scaler that was disabled, expected a disabled one; "
            "make it with enabled=False"
        )
    random = own.random_states()
    check_random_states(random)
    return Prepared(groups, of_torch, schedules, of_scaler, {name: own.value(name) for name in own.values}, random)


def _groups(stored: StoredCheckpoint, names: ModelNames, optimizer: Any) -> list[dict[str, Any]]:
    saved = stored.state["optimizer"]["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"[load_checkpoint] {stored.folder} has an optimizer of {len(saved)} groups, expected "
            f"{len(optimizer.param_groups)}; make the optimizer as it was"
        )
    by_id = names.by_id()
    options = []
    for index, (group, ours) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        here = [by_id.get(id(parameter)) for parameter in ours["params"]]
        if len(here) != len(group["params"]) or any(
            a != b for a, b in zip(here, group["params"], strict=True) if a is not None and b is not None
        ):
            raise ValueError(
                f"[load_checkpoint] group {index} of the optimizer in {stored.folder} has other parameters than this "
                "one, expected the same in the same order; make the optimizer as it was"
            )
        path = f"optimizer.param_groups[{index}]"
        options.append(stored.value("optimizer", "param_groups", index, "options", path=path))
        _require_alike(_present(options[-1], path), ours, path)
        if isinstance(optimizer, BoundOptimizer):
            optimizer.hyperparameters(ours | options[-1])
    return options


def _present(saved: Any, path: str) -> Any:
    """The value; raises TypeError for None."""
    if saved is None:
        raise TypeError(f"{path} is None, expected a value")
    return saved


def _require_alike(saved: Any, ours: Any, path: str) -> None:
    """Raises TypeError if a saved value is of another kind than the one in its place; None may stand for any."""
    if saved is None or ours is None:
        return
    for kinds in ((bool, int, float, torch.Tensor), (str,), (bytes,), (list, tuple), (dict,)):
        if isinstance(ours, kinds) and not isinstance(saved, kinds):
            raise TypeError(f"{path} is a {type(saved).__name__}, expected a {type(ours).__name__}")
    if isinstance(ours, (list, tuple)):
        if isinstance(ours, tuple) and len(saved) != len(ours):
            raise TypeError(f"{path} has {len(saved)} values, expected {len(ours)}")
        for index, (each, other) in enumerate(zip(saved, ours, strict=False)):
            _require_alike(each, other, f"{path}[{index}]")
    elif isinstance(ours, dict):
        for key in ours.keys() & saved.keys():
            _require_alike(saved[key], ours[key], f"{path}.{key}")
