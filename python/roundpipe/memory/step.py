"""Predicts the memory of a model's steps, keeps them within budgets, and compares afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from roundpipe import _core
from roundpipe.call.loss_function import as_losses
from roundpipe.call.run_config import GRAINS, RecomputeGrain
from roundpipe.layers.shell import PythonLayer
from roundpipe.layers.values import Structure
from roundpipe.memory.budget import HostPrediction, predict_host, refuse_device, refuse_host, table
from roundpipe.memory.footprint import Loss, measure
from roundpipe.memory.prediction import DeviceMemory, predict_device

Activations = Literal["device", "host", "recompute"]
_PLACES: dict[Activations, str] = {
    "device": "layers keep them",
    "host": "are recomputed from inputs on the host",
    "recompute": "from a layer below",
}
Microbatch = tuple[list[torch.Tensor], Structure]
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
    """

    device: DeviceMemory
    host: HostPrediction
    recompute_grain: RecomputeGrain
    activations: tuple[Activations, ...]

    def __str__(self) -> str:
        counts = [f"{self.activations.count(place)} {text}" for place, text in _PLACES.items()]
        lines = [
            table("on the fullest device:", self.device.rows(), {"measured so far": self.device.measured or 0}),
            table("on the host:", self.host.rows(), {}),
            f"activations: {', '.join(counts)}",
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
    """

    batch: Microbatch
    label_bytes: int
    loss: Loss | None
    count: int
    route: Any
    mode: _core.PlanMode
    total_rows: int
    savers: tuple[str, ...] = ()

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


def step_shape(
    batch: list[Microbatch],
    labels: list[Microbatch],
    loss_fn: Callable[[Any, Any], Any] | None,
    route: Any,
    mode: _core.PlanMode,
    *,
    count: int | None = None,
    total_rows: int | None = None,
    savers: tuple[str, ...] = (),
) -> StepShape:
    """The step that a call makes of these microbatches; `count` and `total_rows` apply if they are only part of it."""
    largest = largest_of(batch)
    label: Any = labels[largest] if labels else ([], None)

    def loss(outputs: Any) -> list[torch.Tensor]:
        assert loss_fn is not None
        return as_losses(loss_fn(outputs, label[1].join(label[0])))

    return StepShape(
        batch=batch[largest],
        label_bytes=sum(map(_core.settled_bytes, label[0])),
        loss=None if loss_fn is None else loss,
        count=len(batch) if count is None else count,
        route=route,
        mode=mode,
        total_rows=sum(map(rows_of, batch)) if total_rows is None else total_rows,
        savers=savers,
    )


class StepMemory:
    """The memory of one model's steps.

    Args:
        name: the model's name, in messages.
        layers: the layers in the engine's form.
        host_budget: in bytes; None = no budget.
        device_budget: in bytes, for each device; None = no budget.
    """

    def __init__(
        self, name: str, layers: Sequence[PythonLayer], host_budget: int | None, device_budget: int | None
    ) -> None:
        self._name = name
        self._layers = list(layers)
        self._host_budget = host_budget
        self.device_budget = device_budget
        self._measured_for: dict[Any, list[_core.LayerFootprint]] = {}
        self._admitted: dict[Any, RecomputeGrain] = {}
        self._last: MemoryPrediction | None = None
        self._correction = 1.0

    def admit(self, pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain) -> RecomputeGrain:
        """Plans the step within the device budget. REQUIRES: there is one.

        Returns:
            The recompute grain: "layer" if a stage's graph would not fit.

        Raises:
            ValueError: the step cannot fit with these microbatches.
        """
        assert self.device_budget is not None
        engine = _core.Engine.current()
        engine.limit_memory(self.device_budget)
        key = (self._key(step), step.count, step.mode, grain, len(engine))
        if key not in self._admitted:
            self._compare()
            self._admitted[key] = self._fit(pipeline, step, grain, self.device_budget)
        return self._admitted[key]

    def predict(self, pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain) -> MemoryPrediction:
        """Predicts the step's memory. Plans from now on keep to that."""
        footprints = self._footprints(pipeline, step)
        self._tell_planner(pipeline, step, footprints, grain)
        found = self._device(pipeline, step, grain, footprints, self.device_budget or self._cap())
        return MemoryPrediction(found, self._host(pipeline, step), grain, _activations(pipeline, step))

    def last(self) -> MemoryPrediction | None:
        """The last prediction that planned a step, with what has been measured since."""
        if self._last is None:
            return None
        return dataclasses.replace(self._last, device=dataclasses.replace(self._last.device, measured=_peak()))

    def _fit(self, pipeline: _core.Pipeline, step: StepShape, grain: RecomputeGrain, budget: int) -> RecomputeGrain:
        footprints = self._footprints(pipeline, step)
        tried: RecomputeGrain = grain
        while True:
            self._tell_planner(pipeline, step, footprints, tried)
            wanted = self._device(pipeline, step, tried, footprints, budget)
            if wanted.total <= budget or tried == "layer":
                break
            tried = "layer"
        self._last = MemoryPrediction(wanted, self._host(pipeline, step), tried, _activations(pipeline, step))
        if self._host_budget is not None:
            refuse_host("RoundPipe", self._name, self._host_budget, lambda moments: self._host(pipeline, step, moments))
        if wanted.total > budget:
            change = self._change(pipeline, step, footprints, budget, "device_memory=")
            refuse_device("RoundPipe", self._name, budget, wanted, change)
        return tried

    def explain(self, pipeline: _core.Pipeline, shape: Callable[[int], StepShape], rows: int, cap: int) -> str:
        """Explains the memory of a step that a device had no memory for, and the smallest change that would fit.

        Args:
            shape: maps a number of rows in the largest microbatch to the step.
            rows: the step's own number of rows.
            cap: the device's cap in bytes; 0: unknown.

        Raises:
            Exception: nothing can be predicted.
        """
        step = shape(rows)
        footprints, measured = self._footprints_of_some(pipeline, shape, rows)
        wanted = self._device(pipeline, step, "layer", footprints, cap)
        title = f"layer by layer, a step of {self._name} is predicted to take on the fullest device"
        if measured < rows:
            title += f" (worked out from {measured} of {rows} rows, as more did not fit)"
        text = table(f"{title}:", wanted.rows(), {"the device's cap": cap} if cap else {})
        if not cap:
            return text
        correction = self._correction
        try:
            if wanted.total <= cap:
                # It did not fit, so the unpredicted part takes at least the rest.
                self._correction *= 1 + (cap - wanted.total + 1) / max(1, wanted.work)
                text += (
                    "\nthat would have fitted: something else is on the device, or a layer takes more than when it was "
                    "measured. If it takes as much as did not fit:"
                )
            change = self._change(
                pipeline, step, footprints, cap, "a cap of ", lambda some: self._footprints(pipeline, shape(some))
            )
        finally:
            self._correction = correction
            if self.device_budget is not None:
                self._tell_planner(pipeline, step, footprints, self._last.recompute_grain if self._last else "stage")
        return f"{text}\nsmallest change that would fit: {change}"

    def knows(self, layers: int) -> bool:
        """Whether all of a model's layers can be measured."""
        return len(self._layers) == layers

    def describe_layers(self, pipeline: _core.Pipeline) -> str:
        """Describes the layers without running any."""
        most = max(pipeline.layer_bytes(), key=lambda layer: layer.weights + layer.sums)
        weights, sums = _core.format_bytes(most.weights), _core.format_bytes(most.sums)
        return f"the largest layer takes {weights} for its weights and, in a backward, {sums} for gradients"

    def _footprints_of_some(
        self, pipeline: _core.Pipeline, shape: Callable[[int], StepShape], rows: int
    ) -> tuple[list[_core.LayerFootprint], int]:
        """Footprints of `rows` rows, scaled from as many rows as can be measured on a device, and that number."""
        measured = rows
        while True:
            try:
                footprints = self._footprints(pipeline, shape(measured))
                return [footprint.scaled(rows, measured) for footprint in footprints], measured
            except torch.OutOfMemoryError:
                if measured == 1:
                    raise
            measured = -(-measured // 2)

    def _change(
        self,
        pipeline: _core.Pipeline,
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
            if self.device_budget is not None:
                self._tell_planner(pipeline, cut, smaller, "layer")
            return self._device(pipeline, cut, "layer", smaller, budget)

        # Bisects for the most rows that fit: fewer rows take less.
        fits, too_many = 0, rows
        while too_many - fits > 1:
            left = (fits + too_many) // 2
            if taken(left).total <= budget:
                fits = left
            else:
                too_many = left
        while fits and measured is not None and taken(fits, measured(fits)).total > budget:
            fits -= max(1, fits // 16)
        if fits:
            return f"num_microbatch={count_with(fits)} and recompute_grain='layer'"
        one = taken(1)
        wanted = self._device(pipeline, step, "layer", footprints, budget)
        larger = f"{memory}{_core.format_bytes(max(wanted.total, budget + 1))!r}"
        fixed = one.weights + one.gradients
        if fixed > budget:
            return (
                f"{larger}. No number of microbatches helps, and no shorter rows: weights and gradients alone take "
                f"{_core.format_bytes(fixed)}. Layers split into smaller ones, or adapters, would"
            )
        savers = ", ".join(["shorter rows", *step.savers])
        return f"{larger}. No number of microbatches helps: one row takes {_core.format_bytes(one.total)}. Or {savers}"

    def _tell_planner(
        self,
        pipeline: _core.Pipeline,
        step: StepShape,
        footprints: Sequence[_core.LayerFootprint],
        grain: RecomputeGrain,
    ) -> None:
        """Keeps plans within the budget from now on, and never above the demand of the next plan."""
        sizes = _sizes(pipeline, step, grain, footprints)
        kept = [footprint.kept_bytes(GRAINS[grain]) for footprint in footprints]
        outputs = [footprint.outputs for footprint in footprints]
        most = 0 if self.device_budget is None else _core.stage_limit_bytes(sizes, self.device_budget)
        pipeline.set_bytes(kept, outputs, most, 0)
        plans = pipeline.preview_plans(step.route, step.mode, step.count, _STEPS)
        largest = _core.largest_stage_bytes(plans, sizes)
        wanted = self._device(pipeline, step, grain, footprints, self.device_budget or 0)
        pipeline.set_bytes(kept, outputs, largest, max(1, wanted.total - wanted.weights))

    def _device(
        self,
        pipeline: _core.Pipeline,
        step: StepShape,
        grain: RecomputeGrain,
        footprints: Sequence[_core.LayerFootprint],
        limit: int,
    ) -> DeviceMemory:
        plans = pipeline.preview_plans(step.route, step.mode, step.count, _STEPS)
        waits = _core.Engine.current().copies_on_compute_cores()
        found = predict_device(plans, _sizes(pipeline, step, grain, footprints), limit, waits)
        return dataclasses.replace(found, work=int(found.work * self._correction))

    def _host(self, pipeline: _core.Pipeline, step: StepShape, moments: str = "float32") -> HostPrediction:
        footprints = self._footprints(pipeline, step)
        plan = pipeline.preview_plans(step.route, step.mode, step.count, 1)[0]
        values = _core.waiting_on_host(plan, footprints, step.count)
        return predict_host(pipeline.block_parameters(), moments, values, tied_sums=pipeline.tied_sum_bytes())

    def _footprints(self, pipeline: _core.Pipeline, step: StepShape) -> list[_core.LayerFootprint]:
        key = self._key(step)
        if key not in self._measured_for:
            # Running layers would draw from the same generator and count in the same statistics.
            pipeline.drain()
            pipeline.show_weights()
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
        engine = _core.Engine.current()
        caps = [engine.memory(index).limit_bytes for index in range(len(engine))]
        return min((cap for cap in caps if cap), default=0)


def _activations(pipeline: _core.Pipeline, step: StepShape) -> tuple[Activations, ...]:
    plan = pipeline.preview_plans(step.route, step.mode, step.count, 1)[0]
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
    return _core.StepSizes(pipeline.layer_bytes(), footprints, GRAINS[grain], step.label_bytes)


def _peak() -> int:
    engine = _core.Engine.current()
    return max(engine.memory(index).peak_bytes for index in range(len(engine)))
