"""Predicts whether a model fits a machine, before anything is loaded: a plan within the devices' memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from roundpipe import _core
from roundpipe.model.call.run_config import GRAINS, RecomputeGrain
from roundpipe.model.memory.prediction import DeviceMemory, predict_device, predict_devices
from roundpipe.plan.costs import CostSet
from roundpipe.plan.schedules import Request, choose, placed
from roundpipe.plan.shapes import ModelShapes

# How a step may recompute, the fastest first: the grain, and whether each backward stage has one layer. Layer by layer
# in longer stages, forwards run once more, which only pays where the host has little room.
_Way = tuple[RecomputeGrain, bool]
_BY_STAGE: _Way = ("stage", False)
_BY_LAYER: _Way = ("layer", True)
_FROM_FEWER: _Way = ("layer", False)
# Steps that a prediction follows: each step assigns devices again.
_STEPS = 3
# By how much the planner's share of a device's memory is lowered after each attempt that does not fit, at least.
_LOWER = (0.97, 0.97, 0.97, 0.97, 0.9, 0.8, 0.7, 0.5)
_TRIES_OF_RESIDENTS = 3
# Where a limit is too low, the next one is so many times as high.
_MORE = 1.25
# What waits on the host is at least this part of what the fastest plan leaves waiting.
_MOST_SPARED = 64
# Of the search, in microbatch visits, while only memory is asked for.
QUICK_EFFORT = 2_000_000
# Tried row lengths are multiples of this.
ROW_STEP = 1024


@dataclasses.dataclass(frozen=True)
class Layers:
    """The planner's input: the layers of a model, with one microbatch of their values."""

    sizes: Sequence[_core.LayerBytes]
    footprints: Sequence[_core.LayerFootprint]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A plan and its predicted memory.

    Attributes:
        request: the request, with the costs and the device memory that the plan was made with.
        choices: the planner's choices, best first; the other attributes describe the first one.
        device: memory of the fullest device, the one that takes the largest share of what it has.
        grain: the recompute grain.
        values: bytes that wait on the host between stages.
        partial_sums: bytes on the host of the sums that devices send of the layers they share.
        memory: what the fullest device has, in bytes; 0 = not limited.
        memory_of_each: what each device has.
    """

    request: Request
    choices: list[_core.PlanChoice]
    device: DeviceMemory
    grain: RecomputeGrain
    values: int
    partial_sums: int
    memory: int
    memory_of_each: Sequence[int]

    @property
    def fits(self) -> bool:
        """Whether the plan fits on the devices."""
        return not self.memory or self.device.needed <= self.memory

    @property
    def again_ms(self) -> float:
        """What layer by layer recompute adds to a step, which the planner's times leave out: in a stage of several
        layers, the forward of all but the last runs once more."""
        if self.grain != "layer":
            return 0.0
        costs = self.request.costs.layers
        stages = [stage.layers for stage in self.choices[0].backward]
        once = sum(costs[layer].forward_ms for stage in stages for layer in range(stage.first, stage.last - 1))
        return once * self.request.microbatches / sum(self.request.speed_of_each())

    @property
    def step_ms(self) -> float:
        """Of a step, with what layer by layer recompute adds."""
        return float(self.choices[0].step_ms) + self.again_ms

    @property
    def of_a_step(self) -> int:
        """Bytes of a step on the host."""
        return self.values + self.partial_sums

    @property
    def over(self) -> float:
        """What the fullest device takes, as a share of what it has."""
        return self.device.needed / self.memory if self.memory else 0.0


def layers_of_shapes(shapes: ModelShapes) -> Layers:
    """Layers of a model without weights."""
    return Layers([layer.size for layer in shapes.layers], [layer.footprint for layer in shapes.layers])


def layers_of_costs(costs: CostSet) -> Layers:
    """Layers of a cost file, which does not know temporary memory. Weights are assumed to be 16-bit."""
    sizes, footprints, given = [], [], 0
    for cost in costs.layers:
        gradients = cost.gradient_bytes
        sizes.append(_core.LayerBytes(cost.weight_bytes, gradients, 2 * gradients, gradients))
        out = cost.activation_bytes
        footprints.append(_core.LayerFootprint(given, out, out, cost.saved_bytes, cost.saved_bytes, cost.saved_bytes))
        given = out
    return Layers(sizes, footprints)


def card_of_tflops(tflops: float) -> _core.Card:
    """A card of which only the operations count: so many 1e12 a second, as it reaches them."""
    return _core.Card(product_tflops=tflops, attention_tflops=tflops)


def costs_of_shapes(shapes: ModelShapes, card: _core.Card) -> CostSet:
    """Derives times from what a card does for each layer."""
    layers = [
        _core.LayerCost(
            forward_ms=_core.time_ms(layer.forward, card),
            backward_ms=_core.time_ms(layer.backward + _core.gradient_sums(layer.size.gradients), card),
            weight_bytes=layer.size.weights,
            gradient_bytes=layer.size.gradients,
            trained=layer.size.gradients > 0,
            activation_bytes=layer.footprint.outputs,
            saved_bytes=layer.footprint.saved,
        )
        for layer in shapes.layers
    ]
    return CostSet(shapes.name, layers, first_backward_layer=shapes.first_trained, tokens=shapes.tokens)


def fit(
    request: Request,
    layers: Layers,
    memory: int | Sequence[int],
    mode: _core.PlanMode = _core.PlanMode.FUSED,
    host_room: int | None = None,
) -> Fit:
    """The best plan within the memory of the devices and of the host or, if there is none, one that needs little more.

    Recomputes by stage if that fits, else by layer, from as many boundaries as the host has room for.

    Args:
        memory: bytes on every device, or on each; 0 = not limited.
        host_room: bytes on the host for what a step has there beside the model; None = not limited.
    """
    of_each = [memory] * request.devices if isinstance(memory, int) else list(memory)
    found = _fit(request, layers, of_each, mode, host_room)
    if host_room is None or (found is not None and found.fits):
        return found or _over(request, layers, of_each, mode)
    # Not even the longest stages leave little enough waiting: find how little.
    best = _fit(request, layers, of_each, mode, None) or _over(request, layers, of_each, mode)
    quick = dataclasses.replace(request, effort=min(QUICK_EFFORT, request.effort or QUICK_EFFORT))
    room = max(host_room, best.of_a_step // _MOST_SPARED)
    while best.fits and room < best.of_a_step:
        less = _fit(quick, layers, of_each, mode, room)
        if less is not None and less.fits:
            return less
        room = int(_MORE * room) + 1
    return best


def _fit(
    request: Request, layers: Layers, memory: list[int], mode: _core.PlanMode, host_room: int | None
) -> Fit | None:
    """A plan within that room on the host: the best that fits the devices, else the one that needs the least of them;
    None if there is none."""
    best: Fit | None = None
    for way in (_BY_STAGE, _BY_LAYER) if host_room is None else (_BY_STAGE, _BY_LAYER, _FROM_FEWER):
        # The planner counts only weights, gradients and saved activations, and on the host only what layers pass on. So
        # lower its limits until the plan leaves room for everything else.
        share, room = 1.0, host_room
        for lower in _LOWER:
            if room is not None and room <= 0:
                break
            found = _with_share(request, layers, way, share, memory, mode, room or 0)
            if found is None:
                break
            if host_room is not None and room is not None and found.of_a_step > host_room:
                room -= found.of_a_step - host_room
                continue
            if best is None or found.over < best.over:
                best = found
            if best.fits:
                others = (
                    _with_residents(best, layers, way, share, memory, mode, room or 0),
                    _where_all_stay(request, layers, way, memory, mode, room or 0),
                )
                possible = [fit for fit in others if fit and (host_room is None or fit.of_a_step <= host_room)]
                return min([*possible, best], key=lambda fit: fit.step_ms)
            share *= min(lower, 1 / found.over)
    return best


def _with_residents(
    found: Fit, layers: Layers, way: _Way, share: float, memory: list[int], mode: _core.PlanMode, waiting: int
) -> Fit:
    """The plan for devices that keep as many frozen weights as the one found leaves room for, if there is one and it
    leaves the room as well."""
    if found.request.links is None:
        return found
    resident = found.device.resident
    for _ in range(_TRIES_OF_RESIDENTS):
        if resident == 0:
            break
        asked = dataclasses.replace(found.request, resident_bytes=resident)
        again = _with_share(asked, layers, way, share, memory, mode, waiting)
        if again is None or not again.fits:
            break
        if again.device.resident >= resident:
            return again
        resident = again.device.resident
    return found


def _where_all_stay(
    request: Request, layers: Layers, way: _Way, memory: list[int], mode: _core.PlanMode, waiting: int
) -> Fit | None:
    """A plan for devices that keep all frozen weights, so that no stage has room for them of its own."""
    frozen = sum(size.frozen_bytes for size in layers.sizes)
    if frozen == 0 or not all(size > frozen for size in memory):
        return None
    share = 1.0
    for lower in _LOWER:
        found = _with_share(request, layers, way, share, memory, mode, waiting, staying=frozen)
        if found is None or (found.fits and found.device.resident >= frozen):
            return found
        share *= lower
    return None


def _over(request: Request, layers: Layers, memory: list[int], mode: _core.PlanMode) -> Fit:
    """Where not even one layer fits: a plan with a limit above the memory, to report how much the layer takes."""
    share, best = 1.0, None
    while best is None:
        share *= _MORE
        best = _with_share(request, layers, _BY_LAYER, share, memory, mode, 0)
    return best


def _with_share(
    request: Request,
    layers: Layers,
    way: _Way,
    share: float,
    memory: list[int],
    mode: _core.PlanMode,
    waiting: int,
    staying: int = 0,
) -> Fit | None:
    """The planner's plan within that share of each device's memory, and what may wait on the host (0 = no limit); None
    if a layer or the least that waits is larger. `staying`: bytes of all frozen weights, if they are on the device."""
    grain, single = way
    # 0 would be no limit.
    room = [max(1, int(share * (size - staying))) if size else 0 for size in memory]
    frozen_of_each = [
        min(size.frozen_bytes, cost.weight_bytes) for size, cost in zip(layers.sizes, request.costs.layers, strict=True)
    ]
    kept = [
        _core.LayerCost(
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            recompute_ms=cost.recompute_ms,
            weight_bytes=cost.weight_bytes - (frozen if staying else 0),
            gradient_bytes=cost.gradient_bytes,
            trained=cost.trained,
            activation_bytes=cost.activation_bytes,
            saved_bytes=footprint.kept_bytes(GRAINS[grain]),
            frozen_bytes=0 if staying else frozen,
        )
        for cost, frozen, footprint in zip(request.costs.layers, frozen_of_each, layers.footprints, strict=True)
    ]
    costs = dataclasses.replace(request.costs, layers=kept)
    links = None
    if request.links is not None:
        links = costs.cluster(request.devices, room, with_links=True, resident_bytes=request.resident_bytes)
    cluster = costs.cluster(request.devices, room)
    asked = dataclasses.replace(
        request, costs=costs, cluster=cluster, links=links, single_backward_layers=single, max_waiting=waiting
    )
    if grain == "layer":
        asked.keep_layers = 1  # its layers would be recomputed one by one all the same
    try:
        choices = choose(asked, mode)
    except (_core.LayerTooLargeError, _core.HostTooSmallError):
        return None
    plans = placed(choices[0], asked, _STEPS)
    groups = request.gradient_groups or request.microbatches
    # The labels are counted with the last layer's inputs.
    sizes = _core.StepSizes(layers.sizes, layers.footprints, GRAINS[grain], label_bytes=0, gradient_groups=groups)
    device, there = _fullest(plans, sizes, memory)
    values = _core.waiting_on_host(plans[0], layers.footprints, request.microbatches)
    sums = _core.partial_sum_bytes(plans[0], sizes)
    return Fit(asked, choices, device, grain, values, sums, there, memory)


def _fullest(plans: list[_core.Plan], sizes: _core.StepSizes, memory: list[int]) -> tuple[DeviceMemory, int]:
    """The peak of the fullest device, and the memory that it has."""
    if len(set(memory)) == 1:
        return predict_device(plans, sizes, _core.DeviceRules(memory[0])), memory[0]
    peaks = zip(predict_devices(plans, sizes, memory), memory, strict=True)
    return max(peaks, key=lambda peak: peak[0].needed / peak[1] if peak[1] else 0.0)


def longest_row(predict: Callable[[int], Fit], limit: int = 1 << 20) -> tuple[int, Fit | None]:
    """The longest row that is predicted to fit, to within 1/32 and a multiple of `ROW_STEP`, with its prediction.

    0 and None if not even `ROW_STEP` tokens fit.

    Args:
        predict: maps a number of tokens to a prediction.
        limit: longer rows are not tried.
    """
    low, high, best = 0, 0, None
    guess = min(8 * ROW_STEP, limit)
    while True:
        found = predict(guess)
        if found.fits:
            low, best = guess, found
        else:
            high = guess
        if low >= limit or (high and high - low <= max(ROW_STEP, low // 32)):
            return low, best
        guess = min(2 * low, limit) if not high else (low + high) // 2 // ROW_STEP * ROW_STEP
