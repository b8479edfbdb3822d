"""The plan that `roundpipe plan` is asked for, within the memory of devices and host, and what would make it fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe import _core
from roundpipe.model.memory.budget import HostPrediction, UpdateRule, predict_host
from roundpipe.ops.functional import Arithmetic
from roundpipe.plan import fit as fitting
from roundpipe.plan.costs import CostSet, load
from roundpipe.plan.fit import QUICK_EFFORT, ROW_STEP, Fit, longest_row
from roundpipe.plan.model_folder import Train, is_model, measure_folder
from roundpipe.plan.options import EFFORT_PER_SECOND, TOKENS, PlanOptions
from roundpipe.plan.performance.sizes import sized
from roundpipe.plan.schedules import Request
from roundpipe.plan.shapes import ModelShapes

_LONGEST_ROW = 1 << 20
# What a plan needs that does not fit may be less than what one needs that does.
_MORE_MEMORY = (1.0, 1.1, 1.5)


@dataclass(frozen=True)
class DiskUse:
    """What a step does to the disk that holds moments.

    Attributes:
        folder: on the disk.
        step_bytes: that are read in a step, and written again.
        gb_per_s: that the disk reads, and as many that it writes beside them.
        step_ms: of the step.
        endurance_bytes: what the disk is rated to be written; None: not given.
    """

    folder: str
    step_bytes: int
    gb_per_s: float
    step_ms: float
    endurance_bytes: int | None

    @property
    def ms(self) -> float:
        """How long the disk is busy in a step."""
        return self.step_bytes / self.gb_per_s / 1e6 if self.step_bytes else 0.0

    @property
    def days(self) -> float | None:
        """Until it has been written as much as it is rated for; None: that is not given, or nothing is written."""
        if self.endurance_bytes is None or not self.step_bytes:
            return None
        return _core.days_of_disk(self.endurance_bytes, self.step_bytes, self.step_ms)

    def document(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "folder": self.folder,
            "predicted_step_bytes": self.step_bytes,
            "gb_per_s": self.gb_per_s,
            "predicted_busy_ms": self.ms,
            "endurance_bytes": self.endurance_bytes,
            "predicted_days": self.days,
        }

    def line(self) -> str:
        """One line of the report."""
        line = (
            f"disk (predicted): {sized(self.step_bytes)} read and {sized(self.step_bytes)} written a step, busy for "
            f"{self.ms:,.1f} of {self.step_ms:,.1f} ms"
        )
        return line if self.days is None else f"{line}; worn out after {self.days:,.0f} days of training"


@dataclass(frozen=True)
class Planned:
    """A plan and its memory.

    Attributes:
        asked: the request that the options make, before the plan was brought within the memory.
        host: with what a step has there.
        shapes: of a model's folder; None for costs.
        unknown: what the prediction omits; empty: nothing.
        disk: None without one.
    """

    options: PlanOptions
    asked: Request
    fit: Fit
    host: HostPrediction
    shapes: ModelShapes | None
    unknown: str
    disk: DiskUse | None = None

    @property
    def host_fits(self) -> bool:
        room = self.options.host_bytes()
        return room is None or self.host.total <= room

    @property
    def fits(self) -> bool:
        return self.fit.fits and self.host_fits

    def change(self) -> str | None:
        """The cheapest change of options with which it fits, which has been tried; None if none was found."""
        if not self.fit.fits and self.shapes is None and len(set(self.fit.memory_of_each)) > 1:
            # No option is about one of several devices that are not alike.
            return f"{_enough(self.fit.device.needed)} on a device of {sized(self.fit.memory)}"
        for changes in _changes(self):
            if plan_within_memory(dataclasses.replace(self.options, **changes)).fits:
                options = [f"--{name.replace('_', '-')}" for name in changes]
                given = zip(options, changes.values(), strict=True)
                return " ".join(option if value is True else f"{option} {value}" for option, value in given)
        return None


def plan_within_memory(options: PlanOptions) -> Planned:
    """The plan. Where the options leave the number of microbatches open, fewer are taken if the host has no room."""
    planned = _plan(options)
    if options.microbatches is None and planned.fit.fits and not planned.host_fits:
        fewer = _fewer_microbatches(planned)
        if fewer is not None:
            return dataclasses.replace(_plan(dataclasses.replace(options, microbatches=fewer)), options=options)
    return planned


def _plan(options: PlanOptions) -> Planned:
    assert options.model is not None
    shapes = None
    if is_model(options.model):
        shapes = _shapes(options)
        costs = fitting.costs_of_shapes(shapes, options.device_card())
        layers = fitting.layers_of_shapes(shapes)
        host = shapes.host(options.rule)
    else:
        options.refuse(
            ["tokens", "train", "quantise", "arithmetic", "tflops", "card", "products"],
            "a model's folder, because costs are for their own batch",
        )
        costs = load(options.model)
        layers = fitting.layers_of_costs(costs)
        host = _host_of_costs(costs, options.rule)
    request = options.request(costs)
    disk_gb_per_s = options.disk_gb_per_s()
    trained = sum(cost.gradient_bytes for cost in costs.layers) if shapes is None else shapes.trained_bytes
    request.update_gb_per_s = _core.update_rate_with_disk(request.update_gb_per_s, disk_gb_per_s, trained, host.on_disk)
    memory, room = options.memory_bytes(), options.host_bytes()
    mode = _core.PlanMode.INFERENCE if options.mode == "inference" else _core.PlanMode.FUSED
    found = fitting.fit(
        request,
        layers,
        request.memory_of_each() if memory is None else memory,
        mode,
        None if room is None else room - host.total,
    )
    host = dataclasses.replace(host, values=found.values, partial_sums=host.partial_sums + found.partial_sums)
    unknown = "embeddings, and what a layer holds for a moment only; costs do not say (a model's folder does)"
    disk = None
    if options.disk is not None:
        disk = DiskUse(options.disk, host.on_disk, disk_gb_per_s, found.step_ms, options.disk_endurance_bytes())
    return Planned(options, request, found, host, shapes, "" if shapes is not None else unknown, disk)


def _shapes(options: PlanOptions) -> ModelShapes:
    if options.mode == "inference":
        raise ValueError("[options] --mode is inference, expected async or sync for a model's folder")
    assert options.model is not None
    tokens = TOKENS if options.tokens is None else options.tokens
    train: Train = "lora" if options.train == "lora" else "full"
    arithmetic: Arithmetic = "fast" if options.arithmetic == "fast" else "exact"
    return _measured(options.model, tokens, train, arithmetic, options.quantise, tuple(options.quantise_keep or ()))


@functools.lru_cache(maxsize=4)
def _measured(
    model: str, tokens: int, train: Train, arithmetic: Arithmetic, quantise: str | None, keep: tuple[str, ...]
) -> ModelShapes:
    return measure_folder(model, tokens, train, arithmetic, quantise, keep)


def _host_of_costs(costs: CostSet, rule: UpdateRule) -> HostPrediction:
    """Host memory of a cost file's weights, assumed to be 16-bit."""

    def weights(*shape: int, trained: bool) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=trained)

    blocks = []
    for cost in costs.layers:
        count = cost.gradient_bytes // 2
        # A square matrix of each layer's size: some rules keep less of a matrix than of a vector.
        side = math.isqrt(count)
        blocks.append([weights(side, side, trained=True), weights(count - side * side, trained=True)])
        blocks.append([weights(max(cost.weight_bytes // 2 - count, 0), trained=False)])
    return predict_host(blocks, rule)


def _fewer_microbatches(planned: Planned) -> int | None:
    """The most microbatches with which it fits, below those that it has; None if not even one does."""
    low, high = 0, planned.fit.request.microbatches
    while high - low > 1:
        middle = (low + high) // 2
        if _quickly(dataclasses.replace(planned.options, microbatches=middle)).fits:
            low = middle
        else:
            high = middle
    return low or None


def _quickly(options: PlanOptions) -> Planned:
    """A plan of little effort."""
    few = min(QUICK_EFFORT, QUICK_EFFORT if options.effort is None else options.effort)
    return _plan(dataclasses.replace(options, search_seconds=few / EFFORT_PER_SECOND))


def _changes(planned: Planned) -> Iterator[dict[str, Any]]:
    """Changes of options that may make it fit, the cheapest first: what changes no result, then the optimizer's memory,
    then what is trained, then more memory."""
    options = planned.options
    of_devices: list[dict[str, Any]] = [{}]
    if not planned.fit.fits:
        tokens = _shorter_rows(planned)
        of_devices = [{"memory": _enough(int(more * planned.fit.device.needed))} for more in _MORE_MEMORY]
        if tokens is not None:
            of_devices = [{"tokens": tokens}]
    if planned.host_fits:
        yield from of_devices
        return
    of_device = of_devices[-1]
    synchronous = options.mode == "sync" and options.nodes is None
    steps = _core.Steps.SYNCHRONOUS if synchronous else _core.Steps.ASYNCHRONOUS
    ways: list[dict[str, Any]] = [{}, *options.rule.narrower(steps)]
    if planned.shapes is not None and options.train != "lora":
        ways.append({"train": "lora"})
    for way in ways:
        changed = of_device | way
        if changed:
            yield changed
        trial = _quickly(dataclasses.replace(options, **changed))
        fewer = _fewer_microbatches(trial) if trial.fit.fits else None
        if fewer is not None:
            yield changed | {"microbatches": fewer}
    within_devices = _plan(dataclasses.replace(options, **of_device)) if of_device else planned
    yield of_device | {"host_memory": _enough(within_devices.host.total)}


def _shorter_rows(planned: Planned) -> int | None:
    """The longest row that fits the devices; None for costs, and if not even `ROW_STEP` tokens fit."""
    if planned.shapes is None:
        return None
    options = dataclasses.replace(planned.options, host_memory=None)
    most = min(_LONGEST_ROW, planned.shapes.tokens)
    tokens, _ = longest_row(lambda row: _quickly(dataclasses.replace(options, tokens=row)).fit, limit=most)
    return tokens if tokens >= ROW_STEP else None


def _enough(size: int) -> str:
    return f"{math.ceil(size / 1e7) / 100:g}GB"
