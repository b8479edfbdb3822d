"""Cuts several models for one step that runs them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from roundpipe import _core

RunType = Literal["infer", "train", "fused"]


class Stages(NamedTuple):
    """One model's stages in running order. For "fused", the first backward stage is the fused one."""

    forward: list[range]
    backward: list[range]


@dataclass(frozen=True)
class _Layers:
    """One direction of a model: ms and bytes of each layer, first layers first."""

    times: Sequence[float]
    sizes: Sequence[int]


def plan_together(
    run_type: RunType,
    costs: Sequence[Sequence[_core.LayerCost]],
    min_stages: int,
    upper_threshold: float,
    limits_bytes: Sequence[int],
) -> list[Stages]:
    """Cuts each model into stages such that no stage exceeds one common time, chosen best for the whole step.

    A round over all stages takes as long as its longest stage. The longest stage is chosen between the longest layer of
    all models and `upper_threshold` times that layer, so that (number of stages) x (longest stage) is smallest.

    Args:
        run_type: "infer" or "train" for all models; "fused": the last model is for `forward_backward`, the others are
            for "train".
        costs: costs of each model's layers.
        min_stages: smallest number of stages worth counting; fewer stages are treated as this many.
        upper_threshold: >= 1.
        limits_bytes: for each model, the limit of a stage's weights and gradients; a single layer may exceed it. 0: no
            limit.
    """
    forward = [_Layers([c.forward_ms for c in model], [c.weight_bytes for c in model]) for model in costs]
    backward = [
        _Layers([c.forward_ms + c.backward_ms for c in model], [c.weight_bytes + c.gradient_bytes for c in model])
        for model in costs
    ]
    counted = forward if run_type == "infer" else [*forward, *backward]
    longest = max(time for layers in counted for time in layers.times)
    best: list[Stages] = []
    best_ms = float("inf")
    for stage_ms in _candidates(counted, longest, upper_threshold):
        plans = []
        for position, (ahead, behind, limit_bytes) in enumerate(zip(forward, backward, limits_bytes, strict=True)):
            end = len(ahead.times)
            backward_stages: list[range] = []
            if run_type != "infer":
                # From the last layers down, so that the first stage, which may be fused, is a full one.
                backward_stages = _from_the_end(behind, end, stage_ms, limit_bytes)
                if run_type == "fused" and position == len(costs) - 1:
                    end = backward_stages[0].start
            plans.append(Stages(_from_the_end(ahead, end, stage_ms, limit_bytes)[::-1], backward_stages))
        stages = sum(len(plan.forward) + len(plan.backward) for plan in plans)
        step_ms = max(stages, min_stages) * stage_ms
        if step_ms < best_ms:
            best, best_ms = plans, step_ms
    return best


def _candidates(directions: Sequence[_Layers], longest: float, upper_threshold: float) -> list[float]:
    """The times of runs of layers, from the longest layer's time to the threshold, in rising order."""
    limit = longest * upper_threshold * (1 + 1e-9)  # tolerates rounding in the sums
    found = {longest}
    for layers in directions:
        for first in range(len(layers.times)):
            for total in accumulate(layers.times[first:]):
                if total > limit:
                    break
                if total >= longest:
                    found.add(total)
    return sorted(found)


def _from_the_end(layers: _Layers, end: int, stage_ms: float, limit_bytes: int) -> list[range]:
    """Stages of the layers below `end`, last layers first, each as full as allowed."""
    stages: list[range] = []
    while end > 0:
        first, time, size = end - 1, layers.times[end - 1], layers.sizes[end - 1]
        while first > 0:
            time, size = time + layers.times[first - 1], size + layers.sizes[first - 1]
            if time > stage_ms * (1 + 1e-9) or (limit_bytes and size > limit_bytes):
                break
            first -= 1
        stages.append(range(first, end))
        end = first
    return stages
