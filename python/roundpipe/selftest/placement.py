"""Which devices of the pool run a model, for checks of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from roundpipe import RoundPipeRunConfig, _core
from roundpipe.device.pool import DevicePool


def on_devices(
    pool: DevicePool, devices: Sequence[int], layers: int, microbatches: int, mode: Literal["forward", "train", "fused"]
) -> RoundPipeRunConfig:
    """Options of a call whose stages, each of one layer, go to these devices in turn.

    Args:
        mode: "train" is a forward and a later backward, "fused" is `forward_backward`.
    """
    last = layers - 1
    stages = [("forward", layer) for layer in range(last if mode == "fused" else layers)]
    if mode == "fused":
        stages.append(("fused", last))
    if mode != "forward":
        first = last - 1 if mode == "fused" else last
        stages += [("backward", layer) for layer in range(first, -1, -1)]
    jobs = [
        (phase, at, at + 1, 0, microbatches, devices[place % len(devices)], place / len(stages))
        for place, (phase, at) in enumerate(stages)
    ]
    plan = _core.Plan(layers, microbatches, len(pool), 0, jobs)
    return RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)


def layers_for(devices: int) -> int:
    """The fewest layers, but at least four, whose stages in `forward_backward` reach each device."""
    return max(4, devices // 2 + 1)
