"""Memory budgets: limits for a model on the host and on each device, checked before anything is allocated."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.model.memory.parameter_classes import classes_of_parameters

HOST_VARIABLE = "ROUNDPIPE_HOST_MEMORY"
DEVICE_VARIABLE = "ROUNDPIPE_DEVICE_MEMORY"


BudgetError = _core.BudgetError


def is_unmeasured(device_memory: str | int | None) -> bool:
    """Whether the argument or, without one, the environment asks for steps that are not measured before they run."""
    given = os.environ.get(DEVICE_VARIABLE) if device_memory is None else device_memory
    return given == "unmeasured"


def budget_of(given: str | int | None, option: str, variable: str = "") -> int | None:
    """Returns a budget in bytes: the argument's, else the environment variable's if there is one, else None.

    Raises:
        ValueError: the value is neither a number of bytes above 0 nor a size such as "24GB".
    """
    value: Any = os.environ.get(variable) or None if given is None else given
    source = variable if given is None else option
    if value is None:
        return None
    size = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str):
        try:
            size = _core.parse_bytes(value)
        except ValueError:
            size = None
    if size is None or size <= 0:
        raise ValueError(
            f"[RoundPipe] {source} is {value!r}, expected a size above 0 with a unit such as '24GB', or an int of bytes"
        )
    return size


@dataclass(frozen=True)
class HostPrediction:
    """Bytes of a model and its optimizer on the host.

    Attributes:
        weights: all parameters and buffers.
        gradients: gradients of the parameters that are trained.
        masters: what fp32 masters of 16-bit weights take beyond the weights.
        moments: what the optimizer keeps: Adam's two moments in fp32 or, with `moments="8bit"`, in one byte each.
        values: values that a step's microbatches keep on the host until their backward; 0 before a batch is known.
        partial_sums: sums of gradients until they are added up, beyond the gradients: those of the layers that share a
            parameter, and those of devices that share a layer.
        kept_for_failures: with `fault_tolerant`, what jobs have read, at most: it stays until their results are there.
            With `verify_every`, the same of one job, and the results of its second run.
        moments_on_disk: moments that are on a disk, and not in `total`.
        masters_on_disk: likewise.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    values: int = 0
    partial_sums: int = 0
    kept_for_failures: int = 0
    moments_on_disk: int = 0
    masters_on_disk: int = 0

    @property
    def on_disk(self) -> int:
        """Bytes on a disk alone, which a step reads and writes."""
        return self.moments_on_disk + self.masters_on_disk

    @property
    def total(self) -> int:
        """The sum of all entries, in bytes."""
        return self.in_core().total

    def rows(self) -> dict[str, int]:
        """The entries by name."""
        return self.in_core().rows()

    def in_core(self) -> _core.HostPrediction:
        """The same, as the engine has it."""
        return _core.HostPrediction(**vars(self))


def host_prediction(found: _core.HostPrediction) -> HostPrediction:
    """The engine's prediction in the form of this package."""
    return HostPrediction(**{field.name: getattr(found, field.name) for field in fields(HostPrediction)})


@dataclass(frozen=True)
class UpdateRule:
    """A fused optimizer, as far as its memory, and what it moves there, depend on it.

    Attributes:
        optimizer: its name in lower case, such as "adamw".
        moments: "fp32", or "8bit" for Adam and AdamW.
        momentum: of SGD and RMSprop.
        masters: "fp32", or "24bit" for bf16 weights.
        disk: a folder for the moments that memory has no room for; empty: all are in memory.
        disk_memory: what the moments may take of memory then, in bytes; 0: the least.
        disk_holds: "moments", or "masters" for both.
        gradients_at_once: each gradient is used as it lands, and there is room for a few layers' only.
    """

    optimizer: str = "adam"
    moments: str = "fp32"
    momentum: float = 0.0
    masters: str = "fp32"
    disk: str = ""
    disk_memory: int = 0
    disk_holds: str = "moments"
    gradients_at_once: bool = False

    def in_core(self) -> tuple[_core.Algorithm, _core.Hyperparameters, _core.StateFormat]:
        """The same, as the engine has it."""
        hyper = _core.Hyperparameters()
        hyper.momentum = self.momentum
        moments = {"fp32": _core.MomentFormat.FLOAT32, "8bit": _core.MomentFormat.BLOCKWISE_8BIT}
        masters = {"fp32": _core.MasterFormat.FLOAT32, "24bit": _core.MasterFormat.BITS_24}
        algorithm: _core.Algorithm = getattr(_core.Algorithm, self.optimizer.upper())
        return algorithm, hyper, _core.StateFormat(moments[self.moments], masters[self.masters])

    def narrower(self, steps: _core.Steps, weights: torch.dtype | None = None) -> list[dict[str, Any]]:
        """Changes of this rule with which it takes less of the host, in the order in which to try them.

        Args:
            weights: those of the model, if they are known.
        """

        def as_field(name: str, value: str) -> tuple[str, Any]:
            return ("gradients_at_once", True) if name == "gradients" else (name, value)

        ways = _core.narrower_formats(_memory_of(self), steps, weights)
        return [dict(as_field(*change) for change in changes) for changes in ways]

    def traffic(self, weights: torch.dtype = torch.bfloat16) -> float:
        """Bytes of host memory that it reads and writes for each byte of weights that it updates."""
        return _core.update_traffic(*self.in_core(), weights)


ADAM = UpdateRule()
ADAM_8BIT = UpdateRule(moments="8bit")

Rule = UpdateRule | _core.OptimizerMemory


def _memory_of(rule: Rule) -> _core.OptimizerMemory:
    if not isinstance(rule, UpdateRule):
        return rule
    return _core.OptimizerMemory(
        *rule.in_core(), _core.DiskOptions(rule.disk, rule.disk_memory, rule.disk_holds), rule.gradients_at_once
    )


def predict_host(
    blocks: Iterable[Sequence[torch.Tensor]],
    rule: Rule,
    trains: bool = True,
    partial_sums: int = 0,
) -> HostPrediction:
    """Predicts the host memory of parameters and buffers with a fused optimizer; they may be on the meta device.

    Args:
        blocks: parameters whose memory is one block: if any of them is trained, there are gradients for all of them.
        trains: False: nothing is trained, whatever `requires_grad` says.
        partial_sums: see `HostPrediction`.
    """
    found = _core.predict_host(list(blocks), _memory_of(rule), trains, partial_sums)
    return host_prediction(found)


def _layer_of(name: str) -> str:
    """What a parameter is most likely in one block with: the layer of a list or sequence that it is in, or itself."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def predict_model(
    model: nn.Module, rule: Rule, tied: Mapping[str, str] | None = None, trains: bool = True
) -> HostPrediction:
    """Predicts the same for a model that has no blocks yet.

    Args:
        tied: maps the name of each parameter that will be tied to another one to that parameter's name.
    """
    tied = tied or {}
    names: dict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    kept = {name: parameter for name, parameter in model.named_parameters() if name not in tied}
    partial_sums = 0
    for parameter in kept.values():
        mine = names[id(parameter)]
        users = mine | {name for name, other in tied.items() if other in mine}
        if trains:
            partial_sums += _core.tied_sum_bytes(parameter, len(users))
    layers: dict[tuple[str, bool], list[torch.Tensor]] = defaultdict(list)
    for name, parameter in kept.items():
        layers[_layer_of(name), parameter.requires_grad].append(parameter)
    blocks = [*layers.values(), *([buffer] for buffer in model.buffers())]
    named = list(model.named_parameters())
    classes = classes_of_parameters(model.modules())
    memory = _memory_of(rule).of_command(named, [classes.get(id(parameter), []) for _, parameter in named])
    return predict_host(blocks, memory, trains=trains, partial_sums=partial_sums)


def predict_unloaded(model: nn.Module, rule: Rule, trains: bool = True) -> HostPrediction:
    """Predicts the same for a model of transformers on the meta device, whose parameters will be tied when it loads."""
    return predict_model(model, rule, getattr(model, "all_tied_weights_keys", {}), trains)


def refuse_host(
    where: str, name: str, budget: int, predict: Callable[[Rule], HostPrediction], rule: Rule | None = None
) -> None:
    """Raises BudgetError if the model does not fit `budget` with this optimizer; the message says what would fit.

    Args:
        rule: None: nobody knows which optimizer it will be; what any takes at least counts.
    """
    optimizer = None if rule is None else _memory_of(rule)
    _core.require_host(where, name, budget, lambda memory: predict(memory).in_core(), optimizer)
