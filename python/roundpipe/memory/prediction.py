"""Predicts what a training step will hold on each device and on the host, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from roundpipe import _core
from roundpipe.call.run_config import RecomputeGrain
from roundpipe.memory.footprint import LayerFootprint

STAGED = 3
"""Microbatches with values on a device at a time, across the end of a job: one is running, two are staged."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device with the highest peak, at that peak.

    Attributes:
        weights: the weights of the running stage and of the next one, in one arena that lasts for the step.
        gradients: parameter gradients, summed on the device.
        values: values that microbatches pass from stage to stage.
        work: memory of running layers: saved activations and temporaries.
        measured: the highest peak of any device since; None until a step has run.
    """

    weights: int
    gradients: int
    values: int
    work: int
    measured: int | None = None

    @property
    def total(self) -> int:
        """The sum of all entries, in bytes."""
        return self.weights + self.gradients + self.values + self.work

    def rows(self) -> dict[str, int]:
        """The entries by name."""
        return {"weights": self.weights, "gradients": self.gradients, "values": self.values, "work": self.work}


def waiting_on_host(plan: _core.Plan, footprints: Sequence[LayerFootprint], microbatches: int) -> int:
    """Bytes that wait on the host between stages: all microbatches' inputs of each backward stage, and of the step."""
    kept = {job.layers.first for job in plan.jobs if job.phase != "forward"} | {0}
    return microbatches * sum(footprints[layer].inputs for layer in kept)


def predict_device(
    plans: Sequence[_core.Plan],
    layers: Sequence[_core.LayerBytes],
    footprints: Sequence[LayerFootprint],
    grain: RecomputeGrain,
    label_bytes: int,
    limit_bytes: int = 0,
    waits: bool = False,
) -> DeviceMemory:
    """Predicts the peak of any device while it runs the jobs of `plans`, one plan for each step.

    Follows a device's jobs in their order: while one job runs, the weights and first values of the next job are
    uploaded; gradients are downloaded while the next job begins.

    Args:
        label_bytes: bytes of one microbatch's label.
        limit_bytes: limit of a device; if the next job's weights do not fit beside the running job, they come later.
        waits: a job begins only when everything that the previous job sends has gone.
    """
    visits = [_Visit(job, layers, footprints, grain, label_bytes) for plan in plans for job in plan.jobs]
    most = DeviceMemory(0, 0, 0, 0)
    for device in range(plans[0].devices):
        mine = [index for index, visit in enumerate(visits) if visit.device == device]
        nexts = [*(visits[index] for index in mine[1:]), None][: len(mine)]
        # Weights share one arena, large enough for any two consecutive jobs that fit beside each other.
        arena = max(
            (visits[index].pair_weights(after, limit_bytes) for index, after in zip(mine, nexts, strict=True)),
            default=0,
        )
        for place, index in enumerate(mine):
            before = visits[mine[place - 1]] if place > 0 else None
            for moment in visits[index].moments(before, nexts[place], arena, limit_bytes, waits):
                if moment.total > most.total:
                    most = moment
    return most


class _Visit:
    """One job on its device."""

    def __init__(
        self,
        job: _core.Job,
        layers: Sequence[_core.LayerBytes],
        footprints: Sequence[LayerFootprint],
        grain: RecomputeGrain,
        label_bytes: int,
    ) -> None:
        first, last = job.layers.first, job.layers.last
        self.device = job.device
        self.count = job.microbatches.last - job.microbatches.first
        stage = footprints[first:last]
        trains = job.phase != "forward"
        self.weights = sum(layer.weights for layer in layers[first:last])
        self.sums = sum(layer.sums for layer in layers[first:last]) if trains else 0
        self.leaving = sum(layer.gradients for layer in layers[first:last]) if trains else 0
        self.rounded = sum(layer.rounded for layer in layers[first:last]) if trains else 0
        self.values = stage[0].inputs
        if job.phase == "fused":
            self.values += label_bytes
        elif trains:
            self.values += stage[-1].output_gradients
        self.work = _work(stage, trains, grain)

    def _staged(self, after: _Visit | None) -> int:
        """The most that is staged of this job's microbatches and, towards its end, of the next job's."""
        coming = after.count if after is not None else 0
        return max(
            own * self.values + (min(STAGED - own, coming) * after.values if after is not None else 0)
            for own in range(1, min(STAGED, self.count) + 1)
        )

    def _has_room_for(self, after: _Visit, limit_bytes: int) -> bool:
        """Whether the next job's weights, with its first values, fit beside this job."""
        held = self.weights + self.sums + self._staged(after) + self.work
        return limit_bytes == 0 or held + after.weights <= limit_bytes

    def pair_weights(self, after: _Visit | None, limit_bytes: int) -> int:
        """Bytes of this job's weights and, if they fit, of the next job's."""
        has_next = after is not None and self._has_room_for(after, limit_bytes)
        return self.weights + (after.weights if after is not None and has_next else 0)

    def moments(
        self, before: _Visit | None, after: _Visit | None, arena: int, limit_bytes: int, waits: bool
    ) -> list[DeviceMemory]:
        """The bytes held while the job begins, runs and ends."""
        values = self._staged(None)
        if limit_bytes and arena + self.sums + values + self.work > limit_bytes:
            arena = self.weights
        if after is not None and self._has_room_for(after, limit_bytes):
            values = self._staged(after)
        leaving = before.leaving if before is not None and not waits else 0
        return [
            DeviceMemory(arena, self.sums + leaving, values, 0),
            DeviceMemory(arena, self.sums, values, self.work),
            DeviceMemory(arena, self.sums + self.rounded, values, 0),
        ]


def _work(stage: Sequence[LayerFootprint], trains: bool, grain: RecomputeGrain) -> int:
    most = 0
    if not trains:
        for index, layer in enumerate(stage):
            most = max(most, (stage[index - 1].outputs if index > 0 else 0) + layer.forward)
        return most
    below = 0  # held by the layers below
    for layer in stage:
        most = max(most, below + layer.forward, below + layer.backward)
        below += layer.saved if grain == "stage" else layer.outputs
    return most
