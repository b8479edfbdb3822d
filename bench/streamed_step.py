"""What does a synchronous step gain when each layer is updated as soon as its gradient has landed?

Layers with the times of published models, and host updates of 0.3 ns a parameter, run through the real engine on eight
virtual devices: both are emulated, the scheduling is real. Three ways to make the step: all layers at once when the
backward is over; each layer when its gradient has landed, with the next step behind the last of them; and each layer
so, gating only itself. The expected periods are those of a simulation study of the same cases, scaled; its second plan
is the best that was found with at most 1.25 times the weight traffic, ours is the planner's under the same limit.
Every loss is checked: an emulated layer hands its input on.
"""

from __future__ import annotations

import sys

from support import emulation
from support.report import Report, parser

from roundpipe.plan.compare import predict
from roundpipe.plan.costs import load
from roundpipe.plan.schedules import Request

# Per preset: time scale, ms of an update of one layer, and the study's periods in ms: everything after the backward,
# streamed with a barrier, streamed with gates; and the last with the better plan.
CASES: dict[str, tuple[float, float, tuple[float, float, float], float]] = {
    "qwen3-1.7b": (1.0, 15, (2802, 2325, 2325), 2005),
    "llama3.1-8b": (0.4, 65, (8352, 6465, 6269), 5626),
    "gpt-oss-20b": (0.3, 247, (13469, 10987, 10567), 8364),
    "qwen3-32b": (0.25, 146, (33638, 25207, 24329), 22980),
}
WAYS: tuple[tuple[emulation.Gate, str], ...] = (
    ("model", "whole model after the backward"),
    ("step", "streamed, next step waits for all"),
    ("layer", "streamed, layers gate themselves"),
)
DEVICES, MICROBATCHES = 8, 16


def measure(preset: str, schedule: str, gate: emulation.Gate, way: str, expected_ms: float, steps: int) -> list[str]:
    scale, layer_ms, _, _ = CASES[preset]
    costs = load(preset)
    request = Request(
        costs, costs.cluster(DEVICES), microbatches=MICROBATCHES, mode="sync", max_traffic=1.25, gradient_groups=0
    )
    request = emulation.scaled(request, scale)
    # The head, which is last, has no weights of its own in these cases.
    update_ms = [layer_ms * scale] * (len(costs.layers) - 1) + [0.0]
    prediction = predict(schedule, request)
    measured = emulation.emulate(prediction, request, steps, lambda done, total: None, update_ms, gate)
    return [
        preset,
        f"{scale:g}",
        schedule,
        way,
        f"{expected_ms * scale:.0f}",
        f"{measured.step_ms:.0f}",
        f"{measured.step_ms / (expected_ms * scale):.3f}",
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--presets", nargs="+", default=list(CASES))
    arguments.add_argument("--steps", type=int, default=8, help="measured, after two left out")
    options = arguments.parse_args()
    if options.quick:
        options.presets, options.steps = ["qwen3-1.7b"], 2
        CASES["qwen3-1.7b"] = (0.05, *CASES["qwen3-1.7b"][1:])
    report = Report("The streamed synchronous step, on eight emulated devices", options.out)
    report(f"Period of {options.steps} steps after two left out, in ms; {MICROBATCHES} microbatches.")
    report("")
    rows = []
    for preset in options.presets:
        _, _, expected, better = CASES[preset]
        for (gate, way), expected_ms in zip(WAYS, expected, strict=True):
            rows.append(measure(preset, "published", gate, way, expected_ms, options.steps))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        rows.append(measure(preset, "roundpipe", *WAYS[-1], better, options.steps))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    report.table(["costs", "scale", "schedule", "step", "the study's", "measured", "measured / the study's"], rows)
    report.close()


if __name__ == "__main__":
    main()
