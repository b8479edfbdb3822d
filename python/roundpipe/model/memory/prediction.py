"""Predicts what a training step will hold on each device and on the host, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from roundpipe import _core
from roundpipe.model.call.run_config import RecomputeGrain, grain_name
from roundpipe.model.memory.budget import HostPrediction, host_prediction

Activations = Literal["device", "host", "recompute"]
_PLACES: dict[_core.Activations, Activations] = {
    _core.Activations.DEVICE: "device",
    _core.Activations.HOST: "host",
    _core.Activations.RECOMPUTE: "recompute",
}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device with the highest peak, at that peak.

    Attributes:
        weights: the weights of the running stage and of the next one, in one arena that lasts for the step.
        gradients: parameter gradients, summed on the device.
        values: values that microbatches pass from stage to stage.
        work: memory of running layers: saved activations and temporaries.
        resident: frozen weights that stay there, at most, in room that nothing else needs; they go first.
        measured: the highest peak of any device since; None until a step has run.
    """

    weights: int
    gradients: int
    values: int
    work: int
    resident: int = 0
    measured: int | None = None

    @property
    def total(self) -> int:
        """The sum of all entries, in bytes."""
        return self.needed + self.resident

    @property
    def needed(self) -> int:
        """The same without what goes first when memory is short, in bytes."""
        return self.weights + self.gradients + self.values + self.work

    def rows(self) -> dict[str, int]:
        """The entries by name."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "values": self.values,
            "work": self.work,
            "resident": self.resident,
        }


def device_memory(peak: _core.DeviceMemory) -> DeviceMemory:
    """The engine's prediction in the form of this package."""
    return DeviceMemory(peak.weights, peak.gradients, peak.values, peak.work, peak.resident)


def predict_device(plans: Sequence[_core.Plan], sizes: _core.StepSizes, rules: _core.DeviceRules) -> DeviceMemory:
    """Predicts the peak of any device while it runs the jobs of `plans`, one plan for each step.

    Args:
        sizes: the layers, with one microbatch of their values.
        rules: that the devices keep, such as their limit.
    """
    return device_memory(_core.predict_device(plans, sizes, rules))


def predict_devices(
    plans: Sequence[_core.Plan], sizes: _core.StepSizes, cap_bytes: Sequence[int]
) -> list[DeviceMemory]:
    """Predicts the peak of each device, whose limit is its entry of `cap_bytes`, as `predict_device` does."""
    return [device_memory(peak) for peak in _core.predict_devices(plans, sizes, cap_bytes)]


@dataclasses.dataclass(frozen=True)
class MemoryPrediction:
    """The predicted memory of a model's step; `print` shows it as a table.

    Attributes:
        device: memory of the device with the highest peak.
        host: memory of the model and its fused optimizer or, before there is one, a fused Adam with fp32 moments.
        recompute_grain: the grain that the step uses.
        activations: for each layer, the place of its activations between forward and backward: "device" (kept there),
            "host" (its inputs wait on the host, and it is recomputed from them) or "recompute" (from a layer below).
        text: all of it as a table.
        notes: further lines, such as which layers run natively.
    """

    device: DeviceMemory
    host: HostPrediction
    recompute_grain: RecomputeGrain
    activations: tuple[Activations, ...]
    text: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.text, *self.notes])


def memory_prediction(found: _core.MemoryPrediction, notes: tuple[str, ...] = ()) -> MemoryPrediction:
    """The engine's prediction in the form of this package."""
    return MemoryPrediction(
        dataclasses.replace(device_memory(found.device), measured=found.measured_bytes),
        host_prediction(found.host),
        grain_name(found.recompute_grain),
        tuple(_PLACES[place] for place in found.activations),
        found.text(),
        notes,
    )
