"""What a checkpoint holds for Python's objects, compared with what takes it, before it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoints.saving.random_states import check_random_states
from roundpipe.model.step.fused_optimizer import BoundOptimizer


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


def prepared(load: _core.TrainingLoad, optimizer: Any, schedulers: Sequence[Any]) -> Prepared:
    """Reads all of it.

    Raises:
        Exception: a value is not of the kind that its taker has; anything, with `as_damage` around.
    """
    groups = [] if optimizer is None else _groups(load, optimizer)
    of_torch = None if optimizer is None else load.optimizer_state()
    schedules = [load.schedule(index) for index in range(len(schedulers))]
    for scheduler, value in zip(schedulers, schedules, strict=True):
        _require_alike(_present(value, "lr_schedulers"), scheduler.state_dict(), "lr_schedulers")
    random = load.random()
    check_random_states(random)
    return Prepared(groups, of_torch or {}, schedules, load.scaler() or {}, load.values(), random)


def _groups(load: _core.TrainingLoad, optimizer: Any) -> list[dict[str, Any]]:
    options = []
    for index, ours in enumerate(optimizer.param_groups):
        path = f"optimizer.param_groups[{index}]"
        options.append(load.group_options(index))
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
