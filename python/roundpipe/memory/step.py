"""Predicts the memory of a model's steps, keeps them within budgets, and compares afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from roundpipe import _core
from roundpipe.call.loss_function import as_losses
from roundpipe.call.request import ACCUMULATIONS, CallRequest, Microbatch, Route
from roundpipe.call.run_config import GRAINS, RecomputeGrain, TiedGradAccumulation
from roundpipe.layers.emulated import NativeEmulatedLayer
from roundpipe.layers.shell import PythonLayer
from roundpipe.memory.budget import (
    ADAM,
    LEAST,
    HostPrediction,
    Rule,
    predict_host,
    refuse_device,
    refuse_host,
    table,
)
from roundpipe.memory.footprint import Loss, measure
from roundpipe.memory.prediction import DeviceMemory, device_memory, predict_device

Activations = Literal["device", "host", "recompute"]
_PLACES: dict[Activations, str] = {
    "device": "layers keep them",
    "host": "are recomputed from inputs on the host",
    "recompute": "from a layer below",
}
# Steps that a prediction follows: each step assigns devices again.
_STEPS = 3


@dataclasses.dataclass(frozen=True)
class MemoryPrediction:
    """The predicted memory of a model's step; `print` shows it as a table.

    Attributes:
        device: memory of the device with the highest peak.
        host: memory of the model and a fused Adam with fp32 moments.
        recompute_grain: the grain that the step uses.
        activations: for each layer, the place of its activations between forward and backward: "device" (kept there),
            "host" (its inputs wait on the host, and it is recomputed from them) or "recompute" (from a layer below).
        notes: further lines, such as which layers run natively.
    """

    device: DeviceMemory
    host: HostPrediction
    recompute_grain: RecomputeGrain
    activations: tuple[Activations, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = [f"{self.activations.count(place)} {text}" for place, text in _PLACES.items()]
        lines = [
            table("on the fullest device:", self.device.rows(), {"measured so far": self.device.measured or 0}),
            table("on the host:", self.host.rows(), {}),
            f"activations: {', '.join(counts)}",
            *self.notes,
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One requested step.

    Attributes:
        batch: the largest microbatch, on the host.
        label_bytes: bytes of its label.
        loss: maps the model's output to the losses; None: the pipeline computes no loss.
        count: number of microbatches.
        route: the route in the engine's form.
        mode: the plan's mode.
        total_rows: rows of all microbatches.
        savers: options that would reduce the memory of a row, worded for the user.
        gradient_groups: see `RoundPipeRunConfig`; also for `tied_grad_accumulation`, `fault_tolerant` and
            `verify_every`.
    """

    batch: Microbatch
    label_bytes: int
    loss: Loss | None
    count: int
    route: Route
    mode: _core.PlanMode
    total_rows: int
    savers: tuple[str, ...]
    gradient_groups: int
    tied_grad_accumulation: TiedGradAccumulation
    fault_tolerant: bool
    verify_every: int

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.mode != _core.PlanMode.INFERENCE

    @property
    def rows(self) -> int:
        """Rows of the largest microbatch."""
        return rows_of(self.batch)


def rows_of(microbatch: Microbatch) -> int:
    """The size of dim 0, along which a microbatch can be cut."""
    return max((tensor.shape[0] for tensor in microbatch[0] if tensor.dim()), default=1)


def largest_of(batch: Sequence[Microbatch]) -> int:
    """The index of the microbatch that takes the most memory."""
    sizes = [sum(map(_core.settled_bytes, tensors)) for tensors, _ in batch]
    return sizes.index(max(sizes))


def step_shape(request: CallRequest, *, count: int | None = None, total_rows: int | None = None) -> StepShape:
    """The step that a call makes; `count` and `total_rows` apply if the request holds only a part of it."""
    largest = largest_of(request.batch)
    label: Any = request.labels[largest] if request.labels else ([], None)
    loss_fn = request.loss_fn

    def loss(outputs: Any) -> list[torch.Tensor]:
        assert loss_fn is not None
        return as_losses(loss_fn(outputs, label[1].join(label[0])))

    return StepShape(
        batch=request.batch[largest],
        label_bytes=sum(map(_core.settled_bytes, label[0])),
        loss=None if loss_fn is None else loss,
        count=len(request.batch) if count is None else count,
        route=request.route,
        mode=request.mode,
        total_rows=sum(map(rows_of, request.batch)) if total_rows is None else total_rows,
        savers=request.savers,
        gradient_groups=request.config.gradient_groups,
        tied_grad_accumulation=request.config.tied_grad_accumulation,
        fault_tolerant=request.config.fault_tolerant,
        verify_every=request.config.verify_every,
    )


class StepMemory:
    """The memory of one model's steps.

    Args:
        name: the model's name, in messages.
        pipeline: runs the model.
        layers: the layers in the engine's form. Emulated ones take time, not memory: with them nothing is predicted.
        host_budget: in bytes; None = no budget.
        device_budget: in bytes, for each device; None = no budget.
        measures: without a budget, whether steps are measured and planned within the devices' own limits.
    """

    def __init__(
        self,
        name: str,
        pipeline: _core.Pipeline,
        layers: Sequence[PythonLayer | NativeEmulatedLayer],
        host_budget: int | None,
        device_budget: int | None,
        measures: bool,
    ) -> None:
        self._name = name
        self._pipeline = pipeline
        self._layers = [layer for layer in layers if isinstance(layer, PythonLayer)]
        self._has_emulated = len(self._layers) < len(layers)
        self._host_budget = host_budget
        self._device_budget = None if self._has_emulated else device_budget
        self._measured_for: dict[Any, list[_core.LayerFootprint]] = {}
        self._measures = measures and not self._has_emulated
        self._admitted: dict[Any, RecomputeGrain] = {}
        self._within_cap = _core.StepsWithinCap()
        self._rule: Rule | None = None
        self._last: MemoryPrediction | None = None
        self._correction = 1.0

    def take_rule(self, rule: Rule) -> None:
        """Counts the memory of this optimizer from now on; before, predictions are for Adam."""
        self._rule = rule

    def admit(self, request: CallRequest) -> RecomputeGrain:
        """Plans the call within the device budget or, without one, within the devices' own limits.

        Returns:
            The recompute grain: "layer" if a stage's graph would not fit.

        Raises:
            ValueError: the call cannot fit the budget with these microbatches.
        """
        grain = request.config.recompute_grain
        if self._device_budget is None:
            return self._admit_within_cap(request)
        step = step_shape(request)
        engine = _core.Engine.current()
        engine.limit_memory(self._device_budget)
        key = (self._key(step), step.count, step.gradient_groups, step.mode, grain, len(engine))
        if key not in self._admitted:
            self._compare()
            self._admitted[key] = self._fit(step, grain, self._device_budget)
        return self._admitted[key]

    def _admit_within_cap(self, request: CallRequest) -> RecomputeGrain:
        grain = request.config.recompute_grain
        if not self._measures or not self._cap():
            return grain
        step = step_shape(request)
        admitted = self._within_cap.step_of(
            self._pipeline,
            step.route,
            step.mode,
            step.count,
            step.gradient_groups,
            GRAINS[grain],
            step.batch[0],
            step.label_bytes,
        )
        if admitted is None:
            return grain
        known = self._within_cap.known(admitted)
        if known is None:
            planned = _core.PlannedMemory(GRAINS[grain])
            # The call itself says what is wrong, or runs where a single layer did not.
            with contextlib.suppress(Exception):
                planned = self._plan_within_caps(step, grain, self._footprints(step))
            self._within_cap.admit(admitted, planned)
            known = planned.grain
        return _name_of(known)

    def _plan_within_caps(
        self, step: StepShape, grain: RecomputeGrain, footprints: Sequence[_core.LayerFootprint]
    ) -> _core.PlannedMemory:
        sizes = _sizes(self._pipeline, step, grain, footprints)
        return self._pipeline.plan_within_caps(step.route, step.mode, step.count, sizes)

    def fits(self, request: CallRequest) -> bool:
        """Whether the device budget, if there is one, has room for the call, layer by layer if need be."""
        if self._device_budget is None:
            return True
        step = step_shape(request)
        _, wanted = self._least(step, request.config.recompute_grain, self._footprints(step), self._device_budget)
        return wanted.needed <= self._device_budget

    def predict(self, request: CallRequest) -> MemoryPrediction:
        """Predicts the call's memory. Plans from now on keep to that."""
        step, grain = step_shape(request), request.config.recompute_grain
        footprints = self._footprints(step)
        if self._device_budget is None and self._measures and step.trains:
            planned = self._plan_within_caps(step, grain, footprints)
            grain, found = _name_of(planned.grain), device_memory(planned.device)
        else:
            self._tell_planner(step, footprints, grain)
            found = self._device(step, grain, footprints, self._device_budget or self._cap())
        return MemoryPrediction(found, self._host(step, grain), grain, _activations(self._pipeline, step, grain))

    def last(self) -> MemoryPrediction | None:
        """The last prediction that planned a step, with what has been measured since."""
        if self._last is None:
            return None
        return dataclasses.replace(self._last, device=dataclasses.replace(self._last.device, measured=_peak()))

    def _fit(self, step: StepShape, grain: RecomputeGrain, budget: int) -> RecomputeGrain:
        footprints = self._footprints(step)
        tried, wanted = self._least(step, grain, footprints, budget)
        self._last = MemoryPrediction(wanted, self._host(step, tried), tried, _activations(self._pipeline, step, tried))
        if self._host_budget is not None:
            predict = functools.partial(self._host, step, tried)
            refuse_host("RoundPipe", self._name, self._host_budget, predict, self._rule or LEAST)
        if wanted.needed > budget:
            change = self._change(step, footprints, budget, "device_memory=")
            refuse_device("RoundPipe", self._name, budget, wanted, change)
        return tried

    def _least(
        self, step: StepShape, grain: RecomputeGrain, footprints: Sequence[_core.LayerFootprint], budget: int
    ) -> tuple[RecomputeGrain, DeviceMemory]:
        """The recompute grain with which the step fits, else "layer", and what it takes then. Plans keep to that."""
        sizes = _sizes(self._pipeline, step, grain, footprints)
        planned = self._pipeline.plan_within(step.route, step.mode, step.count, sizes, budget, self._correction)
        return _name_of(planned.grain), device_memory(planned.device)

    def explain(self, shape: Callable[[int], StepShape], rows: int, cap: int) -> str:
        """Explains the memory of a step that a device had no memory for, and the smallest change that would fit.

        Args:
            shape: maps a number of rows in the largest microbatch to the step.
            rows: the step's own number of rows.
            cap: the device's cap in bytes; 0: unknown.

        Raises:
            Exception: nothing can be predicted.
        """
        if self._has_emulated:
            raise ValueError("emulated layers take time, not memory")
        step = shape(rows)
        footprints, measured = self._footprints_of_some(shape, rows)
        wanted = self._device(step, "layer", footprints, cap)
        title = f"layer by layer, a step of {self._name} is predicted to take on the fullest device"
        if measured < rows:
            title += f" (worked out from {measured} of {rows} rows, as more did not fit)"
        text = table(f"{title}:", wanted.rows(), {"the device's cap": cap} if cap else {})
        if not cap:
            return text
        correction = self._correction
        try:
            if wanted.needed <= cap:
                # It did not fit, so the unpredicted part takes at least the rest.
                self._correction *= 1 + (cap - wanted.needed + 1) / max(1, wanted.work)
                text += (
                    "\nthat would have fitted: something else is on the device, or a layer takes more than when it was "
                    "measured. If it takes as much as did not fit:"
                )
            change = self._change(step, footprints, cap, "a cap of ", lambda some: self._footprints(shape(some)))
        finally:
            self._correction = correction
            if self._device_budget is not None:
                self._tell_planner(step, footprints, self._last.recompute_grain if self._last else "stage")
        return f"{text}\nsmallest change that would fit: {change}"

    def describe_layers(self) -> str:
        """Describes the layers without running any."""
        most = max(self._pipeline.layer_bytes(), key=lambda layer: layer.weights + layer.sums)
        weights, sums = _core.format_bytes(most.weights), _core.format_bytes(most.sums)
        return f"the largest layer takes {weights} for its weights and, in a backward, {sums} for gradients"

    def _footprints_of_some(
        self, shape: Callable[[int], StepShape], rows: int
    ) -> tuple[list[_core.LayerFootprint], int]:
        """Footprints of `rows` rows, scaled from as many rows as can be measured on a device, and that number."""
        measured = rows
        while True:
            try:
                footprints = self._footprints(shape(measured))
                return [footprint.scaled(rows, measured) for footprint in footprints], measured
            except torch.OutOfMemoryError:
                if measured == 1:
                    raise
            measured = -(-measured // 2)

    def _change(
        self,
        step: StepShape,
        footprints: Sequence[_core.LayerFootprint],
        budget: int,
        memory: str,
        measured: Callable[[int], Sequence[_core.LayerFootprint]] | None = None,
    ) -> str:
        """The smallest change to the step that would fit.

        Args:
            memory: the start of a request for a larger device; the size follows it.
            measured: maps a number of rows to footprints; None: in proportion to the step's footprints.
        """
        rows = step.rows

        def count_with(left: int) -> int:
            return -(-step.total_rows // left)

        def taken(left: int, smaller: Sequence[_core.LayerFootprint] | None = None) -> DeviceMemory:
            """The memory with as many microbatches as needed for at most this many rows each."""
            cut = dataclasses.replace(step, count=count_with(left))
            smaller = smaller or [footprint.scaled(left, rows) for footprint in footprints]
            if self._device_budget is not None:
                self._tell_planner(cut, smaller, "layer")
            return self._device(cut, "layer", smaller, budget)

        # Bisects for the most rows that fit: fewer rows take less.
        fits, too_many = 0, rows
        while too_many - fits > 1:
            left = (fits + too_many) // 2
            if taken(left).needed <= budget:
                fits = left
            else:
                too_many = left
        while fits and measured is not None and taken(fits, measured(fits)).needed > budget:
            fits -= max(1, fits // 16)
        if fits:
            return f"num_microbatch={count_with(fits)} and recompute_grain='layer'"
        one = taken(1)
        wanted = self._device(step, "layer", footprints, budget)
        larger = f"{memory}{_core.format_bytes(max(wanted.needed, budget + 1))!r}"
        fixed = one.weights + one.gradients
        if fixed > budget:
            return (
                f"{larger}. No number of microbatches helps, and no shorter rows: weights and gradients alone take "
                f"{_core.format_bytes(fixed)}. Layers split into smaller ones, or adapters, would"
            )
        savers = ", ".join(["shorter rows", *step.savers])
        return f"{larger}. No number of microbatches helps: one row takes {_core.format_bytes(one.needed)}. Or {savers}"

    def _tell_planner(
        self,
        step: StepShape,
        footprints: Sequence[_core.LayerFootprint],
        grain: RecomputeGrain,
    ) -> DeviceMemory:
        """Keeps plans within the budget from now on, and never above the demand of the next plan, which it returns."""
        sizes = _sizes(self._pipeline, step, grain, footprints)
        budget = self._device_budget or 0
        found = self._pipeline.plan_as(step.route, step.mode, step.count, sizes, budget, self._correction)
        return device_memory(found)

    def _device(
        self,
        step: StepShape,
        grain: RecomputeGrain,
        footprints: Sequence[_core.LayerFootprint],
        limit: int,
    ) -> DeviceMemory:
        plans = _plans(self._pipeline, step, grain)
        rules = _core.Engine.current().device_rules(limit)
        found = predict_device(plans, _sizes(self._pipeline, step, grain, footprints), rules)
        return dataclasses.replace(found, work=int(found.work * self._correction))

    def _host(self, step: StepShape, grain: RecomputeGrain, rule: Rule | None = None) -> HostPrediction:
        rule = rule or self._rule or ADAM
        footprints = self._footprints(step)
        pipeline = self._pipeline
        plan = _plans(pipeline, step, grain, steps=1)[0]
        values = _core.waiting_on_host(plan, footprints, step.count)
        accumulation = ACCUMULATIONS[step.tied_grad_accumulation]
        sums = pipeline.partial_sum_bytes(plan, step.gradient_groups, accumulation)
        found = predict_host(pipeline.block_parameters(), rule, values, partial_sums=sums)
        kept = 0
        labels = step.count * step.label_bytes
        if step.fault_tolerant:
            # The weights that the step's jobs have read, beside their successors; values that no job has to read again,
            # and the gradients of values; labels.
            kept += found.gradients + 2 * values + labels
        if step.verify_every and step.trains:
            # The same of one job, and the results of its second run until they are compared.
            stage = _core.largest_stage_bytes([plan], _sizes(pipeline, step, "stage", footprints))
            kept += 2 * (stage + values) + labels
        return dataclasses.replace(found, kept_for_failures=kept)

    def _footprints(self, step: StepShape) -> list[_core.LayerFootprint]:
        key = self._key(step)
        if key not in self._measured_for:
            # Running layers would draw from the same generator and count in the same statistics.
            self._pipeline.drain()
            self._pipeline.show_weights()
            device = torch.device(_core.Engine.current().torch_devices()[0])
            self._measured_for[key] = measure(self._layers, step.batch, step.loss, device, step.trains)
        return self._measured_for[key]

    def _key(self, step: StepShape) -> Any:
        modes = tuple(layer.mode_key() for layer in self._layers)
        return (
            tuple((t.shape, t.dtype, t.requires_grad) for t in step.batch[0]),
            modes,
            step.loss is None,
            step.trains,
        )

    def _compare(self) -> None:
        """Remembers how far off the last prediction was, if it was too small."""
        if self._last is None:
            return
        predicted = self._last.device
        missing = _peak() - predicted.total
        if missing > 0 and predicted.work > 0:
            self._correction *= 1 + missing / predicted.work

    @staticmethod
    def _cap() -> int:
        return _core.Engine.current().smallest_cap_bytes()


def _plans(pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain, steps: int = _STEPS) -> list[_core.Plan]:
    return pipeline.preview_plans(step.route, step.mode, step.count, step.gradient_groups, GRAINS[grain], steps)


def _activations(pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain) -> tuple[Activations, ...]:
    plan = _plans(pipeline, step, grain, steps=1)[0]
    places: list[Activations] = ["recompute"] * plan.layers
    for job in plan.jobs:
        if job.phase == "fused":
            places[job.layers.first : job.layers.last] = ["device"] * (job.layers.last - job.layers.first)
        elif job.phase == "backward":
            places[job.layers.first] = "host"
    return tuple(places)


def _sizes(
    pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain, footprints: Sequence[_core.LayerFootprint]
) -> _core.StepSizes:
    return _core.StepSizes(pipeline.layer_bytes(), footprints, GRAINS[grain], step.label_bytes, step.gradient_groups)


def _name_of(grain: _core.RecomputeGrain) -> RecomputeGrain:
    return "layer" if grain == _core.RecomputeGrain.LAYER else "stage"


def _peak() -> int:
    engine = _core.Engine.current()
    return max(engine.memory(index).peak_bytes for index in range(len(engine)))
