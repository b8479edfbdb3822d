"""Does throughput grow with the devices as the planner predicts?

Layers of a given duration (emulated: they occupy their virtual device without computing) run through the real engine
on 1 to 8 virtual devices, in synchronous and asynchronous steps. Ideal is the work of a step divided by the devices;
predicted is what the simulator says of the plan that was run, in the steady state, without any cost for the engine. So
a step that is not ideal loses time to the plan's shape (predicted less ideal: by the number of microbatches, a step
fills and drains, or waits for the one before) or to the engine (measured less predicted), and the table has both. The
first steps, in which the engine measures the layers and plans again, are left out. The second table has the simulator's
best plan for more microbatches than the default.
"""

from __future__ import annotations

import statistics
import time

import torch
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import _core

BACKWARD = 2  # times the forward


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs * target).sum()


def work_ms(plan: _core.Plan, layer_ms: float) -> float:
    """What the devices are occupied with in one step: every microbatch of every job, recomputation included."""
    total = 0.0
    for job in plan.jobs:
        layers = job.layers.last - job.layers.first
        microbatches = job.microbatches.last - job.microbatches.first
        times = {"forward": 1, "fused": 1 + BACKWARD, "backward": 1 + BACKWARD}[job.phase]
        total += times * layers * microbatches * layer_ms
    return total


def measure(layers: int, layer_ms: float, devices: int, is_async: bool, steps: int, warm_up: int) -> list[str]:
    roundpipe.devices(f"virtual:{devices}")
    microbatches = devices + 1
    model = roundpipe.RoundPipe(
        nn.Sequential(*[roundpipe.EmulatedLayer(layer_ms, BACKWARD * layer_ms) for _ in range(layers)]),
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=microbatches),
    )
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    batch = torch.ones(microbatches, 4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    ends = []
    for _ in range(warm_up + steps):
        loss = model.forward_backward(input_args=(batch,), label=batch, loss_fn=loss_fn)
        if loss.item() != batch.numel():
            raise SystemExit(f"the loss is {loss.item()}, expected {batch.numel()}: the input, handed on")
        model.step(update, is_async=is_async)
        # An asynchronous step returns while its backward runs: its end is seen one step later, equally for all.
        ends.append(time.perf_counter())
    model.synchronize()
    step_ms = statistics.mean(b - a for a, b in zip(ends[warm_up - 1 : -1], ends[warm_up:], strict=True)) * 1e3
    plan = model.last_plan()
    costs = [_core.LayerCost(forward_ms=layer_ms, backward_ms=BACKWARD * layer_ms)] * layers
    cluster = _core.Cluster(devices=[(1.0, 0)] * devices)
    rules = _core.TimingRules(asynchronous=is_async)
    placer = _core.Placer(plan, costs, cluster, rules)  # as the engine goes on from step to step
    limit = model.step_report().limited_by
    predicted_ms = _core.simulate([placer.next() for _ in range(16)], costs, cluster, rules).steady_step_ms
    ideal_ms = work_ms(plan, layer_ms) / devices
    return [
        f"{layer_ms:g}",
        str(devices),
        "asynchronous" if is_async else "synchronous",
        f"{step_ms:.1f}",
        f"{predicted_ms:.1f}",
        f"{ideal_ms:.1f}",
        f"{ideal_ms / step_ms:.3f}",
        f"{100 * (predicted_ms - ideal_ms) / step_ms:.1f}",
        f"{100 * (step_ms - predicted_ms) / step_ms:.1f}",
        limit,
    ]


def of_ideal(layers: int, devices: int, microbatches: int, is_async: bool, groups: int) -> str:
    """The share of ideal that the planner's best plan reaches in the simulator."""
    costs = [_core.LayerCost(forward_ms=1, backward_ms=BACKWARD)] * layers
    best = _core.search(
        costs,
        _core.Cluster(devices=[(1.0, 0)] * devices),
        microbatches=microbatches,
        rules=_core.TimingRules(asynchronous=is_async, hop_on_same_device=True),
        interleave=False,
        gradient_groups=groups,
        max_fused_layers=layers,
    )[0]
    return f"{1 - best.bubble:.3f}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layer-ms", type=float, nargs="+", default=[5, 10, 20, 50])
    arguments.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--warm-up", type=int, default=4)
    options = arguments.parse_args()
    if options.quick:
        options.layer_ms, options.devices, options.layers, options.steps, options.warm_up = [1], [1, 2], 4, 2, 1
    report = Report("Scaling: throughput on 1 to 8 virtual devices against the ideal", options.out)
    report(
        f"{options.layers} emulated layers, backward {BACKWARD} times the forward, as many microbatches as devices and "
        f"one more, the planner's stages; means of {options.steps} steps after {options.warm_up} left out. "
        "Of ideal = ideal / measured step; the losses are in percent of the measured step, and together make up the "
        "rest. Limited by: what `model.step_report()` says of the predicted step."
    )
    report("")
    header = ["layer ms", "devices", "step", "measured ms", "predicted ms", "ideal ms"]
    header += ["of ideal", "lost to the plan's shape %", "lost to the engine %", "limited by"]
    rows = [
        measure(options.layers, layer_ms, devices, is_async, options.steps, options.warm_up)
        for layer_ms in options.layer_ms
        for devices in options.devices
        for is_async in (False, True)
    ]
    report.table(header, rows)
    report(
        f"What more microbatches give, predicted: the share of ideal that the best plan of {options.layers} such "
        "layers reaches. The default is one more than the devices."
    )
    report("")
    counts = [3, 5] if options.quick else [9, 16, 24, 32, 64]
    devices = max(options.devices)
    report.table(
        ["devices", "step", "gradient groups", *(f"{count} microbatches" for count in counts)],
        [
            [
                str(devices),
                "asynchronous" if is_async else "synchronous",
                "one" if groups == 1 else "as many as microbatches",
                *(of_ideal(options.layers, devices, count, is_async, groups or count) for count in counts),
            ]
            for is_async, groups in ((False, 1), (False, 0), (True, 1))
        ],
    )
    report.close()


if __name__ == "__main__":
    main()
