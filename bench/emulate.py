"""Does the real engine take the time that the simulator predicts?

Each preset's layers are emulated on eight virtual devices (they take their published time, scaled, without computing)
and run through the real engine in real time, by the planner's own plan, asynchronously and synchronously. Then the
schedules of other systems run through the same engine, to see whether they come out in the order that the simulator
gives. Every loss is checked: an emulated layer hands its input on.

With `--links`, every byte moves, too: weights, gradients and activations of scaled sizes are copied over links that are
throttled to scaled bandwidths. Each preset then runs by three plans: the planner's, which counts bytes, the planner's
if it does not, and the published one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

from support import emulation
from support.presets import LINK_SCALES, TRAFFIC
from support.report import Report, parser

from roundpipe.plan.compare import predict
from roundpipe.plan.costs import load
from roundpipe.plan.options import EFFORT_PER_SECOND
from roundpipe.plan.performance import pictures
from roundpipe.plan.performance.timeline import spans_of_records
from roundpipe.plan.schedules import Prediction, Request, choose, predict_choice

DEVICES = 8
# Such that the shortest layer takes 5 ms or more.
SCALES = {
    "qwen3-1.7b": 1.0,
    "llama3.1-8b": 0.5,
    "gpt-oss-20b": 0.5,
    "qwen3-32b": 0.25,
    "qwen3-235b-lora": 0.25,
}
OTHERS = ["roundpipe", "published", "looped-bfs", "interleaved-1f1b", "1f1b", "gpipe"]
MOST_TRAFFIC = 2
# Of the synchronous searches without links, as `--search-seconds 6`.
SEARCH_EFFORT = 6 * EFFORT_PER_SECOND
# The planner's plan runs in every round, the two others in the first of them.
ROUNDS_OF_OTHERS = 2
# Of the layers in the picture.
PICTURED = "llama3.1-8b"
# Plans whose predictions differ by less count as equal.
DISTINCT = 0.01
# Until the pace is steady: placements differ from step to step, and a device takes memory for its two largest
# consecutive stages when they first come, which holds up its next weights once.
LINK_WARM_UP = {"async": 12, "sync": 1}


def bubble_percent(prediction: Prediction, predicted_ms: float, measured_ms: float) -> float:
    """The devices' idle time if the work that was predicted takes this long."""
    return 100 * (1 - (1 - prediction.bubble_percent / 100) * predicted_ms / measured_ms)


def measure(preset: str, scale: float, mode: str, microbatches: int, groups: int, steps: int) -> list[str]:
    """The planner's plan with the engine's own rules, as `roundpipe plan` chooses it."""
    costs = load(preset)
    request = Request(costs, costs.cluster(DEVICES), microbatches, interleave=False, gradient_groups=groups)
    if mode == "sync":
        request = dataclasses.replace(request, mode="sync", max_traffic=MOST_TRAFFIC, effort=SEARCH_EFFORT)
    choices = choose(request)
    prediction = predict_choice("roundpipe", emulation.scaled(request, scale), choices)
    return row(prediction, emulation.scaled(request, scale), preset, scale, f"{mode}, {groups}", steps)


def measure_other(name: str, preset: str, scale: float, microbatches: int, steps: int) -> list[str]:
    costs = load(preset)
    request = Request(costs, costs.cluster(DEVICES), microbatches, mode="sync", gradient_groups=0)
    request = emulation.scaled(request, scale)
    return row(predict(name, request), request, preset, scale, "sync, any", steps)


def row(prediction: Prediction, request: Request, preset: str, scale: float, kind: str, steps: int) -> list[str]:
    measured = emulation.emulate(prediction, request, steps, progress_of(f"{preset} {prediction.name} {kind}"))
    return [
        preset,
        f"{scale:g}",
        kind,
        prediction.name,
        f"{prediction.traffic_ratio:.2f}",
        f"{prediction.step_ms:.1f}",
        f"{measured.step_ms:.1f}",
        f"{measured.step_ms / prediction.step_ms:.4f}",
        f"{prediction.bubble_percent:.2f}",
        f"{bubble_percent(prediction, prediction.step_ms, measured.step_ms):.2f}",
    ]


def progress_of(name: str) -> emulation.Progress:
    return lambda done, total: print(f"{name}: step {done} of {total}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Linked:
    """A plan over links: what the simulator says, scaled, and what the rounds took."""

    prediction: Prediction
    predicted_ms: float
    measured_ms: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.measured_ms)

    @property
    def spread(self) -> float:
        return (max(self.measured_ms) - min(self.measured_ms)) / self.median_ms


def linked_plans(request: Request, scale: float) -> list[Linked]:
    blind = choose(dataclasses.replace(request, links=None))
    predictions = [
        predict("roundpipe", request),
        predict_choice("bytes not counted", request, blind),
        predict("published", request),
    ]
    return [Linked(prediction, scale * span_ms(prediction, request.mode)) for prediction in predictions]


def span_ms(prediction: Prediction, mode: str) -> float:
    """What the engine's records show: the pace, or from the first layer's start to the last layer's end."""
    if mode == "async":
        return prediction.step_ms
    events = prediction.timeline.events
    return max(event.end_ms for event in events) - min(event.start_ms for event in events)


def order_is_kept(plans: list[Linked]) -> bool:
    """Whether plans that differ by more than `DISTINCT` by prediction come in the same order by measurement."""
    return all(
        faster.median_ms < slower.median_ms
        for faster in plans
        for slower in plans
        if faster.predicted_ms < slower.predicted_ms * (1 - DISTINCT)
    )


def measure_links(preset: str, scale: float, mode: str, options: argparse.Namespace) -> list[list[str]]:
    costs = load(preset)
    request = Request(
        costs,
        costs.cluster(DEVICES),
        options.microbatches,
        mode="sync" if mode == "sync" else "async",
        interleave=False,
        links=costs.cluster(DEVICES, with_links=True),
    )
    size_factor = scale * TRAFFIC
    links = emulation.Links(costs.rates["link_up_gb_per_s"], costs.rates["host_gb_per_s"])
    plans = linked_plans(request, scale)
    for run in range(options.runs):
        for plan in plans if run < ROUNDS_OF_OTHERS else plans[:1]:
            measured = emulation.emulate(
                plan.prediction,
                emulation.scaled(request, scale, size_factor),
                options.steps,
                progress_of(f"{preset} {mode} {plan.prediction.name}, run {run + 1}"),
                links=links.scaled(scale, size_factor),
                warm_up=LINK_WARM_UP[mode],
            )
            plan.measured_ms.append(measured.step_ms)
    kept = order_is_kept(plans)
    return [
        [
            preset,
            f"{scale:g}",
            mode,
            plan.prediction.name,
            f"{plan.predicted_ms:.1f}",
            f"{plan.median_ms:.1f}",
            f"{plan.median_ms / plan.predicted_ms:.4f}",
            f"{len(plan.measured_ms)}: {100 * plan.spread:.1f}",
            "yes" if kept else "no",
        ]
        for plan in plans
    ]


def report_links(report: Report, options: argparse.Namespace) -> None:
    report(
        f"{DEVICES} virtual devices, {options.microbatches} microbatches, one gradient group. Links of "
        f"{1000 * 25 * TRAFFIC:g} MB/s each way, {1000 * 200 * TRAFFIC:g} MB/s for all together, which stand for 25 "
        "and 200 GB/s; times and sizes scaled alike. Asynchronous: the pace of "
        f"{options.steps} steps after {LINK_WARM_UP['async']} left out; synchronous: the median of {options.steps} "
        f"steps after {LINK_WARM_UP['sync']}, each from the first layer's start to the last one's end. Medians of "
        "runs, interleaved; the spread is largest less smallest. Times in ms, scaled as given."
    )
    report("")
    header = ["costs", "scale", "steps", "plan", "predicted", "measured", "measured / predicted"]
    header += ["runs: spread %", "in the predicted order"]
    rows = []
    for preset in options.presets:
        for mode in options.modes:
            rows += measure_links(preset, options.scale or LINK_SCALES[preset], mode, options)
    report.table(header, rows)


def report_hops(report: Report, options: argparse.Namespace) -> None:
    report(
        f"{DEVICES} virtual devices, {options.microbatches} microbatches; asynchronous: pace of {options.steps} steps "
        f"after two left out; synchronous: median of single steps, weight traffic of at most {MOST_TRAFFIC}, search "
        f"of {SEARCH_EFFORT:,} visits. Groups: gradient groups. Times in ms, scaled as given."
    )
    report("")
    header = ["costs", "scale", "steps, groups", "schedule", "traffic", "predicted", "measured", "measured / predicted"]
    header += ["bubble % predicted", "bubble % measured"]
    kinds = [("async", 1), *(("sync", groups) for groups in options.groups)]
    kinds = [kind for kind in kinds if kind[0] in options.modes]
    rows = [
        measure(preset, options.scale or SCALES[preset], mode, options.microbatches, groups, options.steps)
        for preset in options.presets
        for mode, groups in kinds
    ]
    report.table(header, rows)
    if options.others == "none":
        return
    report("The same engine with the schedules of other systems, synchronous:")
    report("")
    scale, steps = SCALES[options.others], min(3, options.steps)
    names = ["1f1b"] if options.quick else OTHERS
    rows = [measure_other(name, options.others, scale, options.microbatches, steps) for name in names]
    report.table(header, rows)


def draw(path: Path, steps: int, scale: float) -> None:
    """Draws the last of some synchronous steps: 1F1B, and ours with microbatches divided anywhere."""
    costs = load(PICTURED)
    rows = []
    for name in ("1f1b", "roundpipe"):
        request = Request(costs, costs.cluster(DEVICES), 16, "sync", max_traffic=1.25, gradient_groups=0)
        request = emulation.scaled(request, scale)
        prediction = predict(name, request)
        measured = emulation.emulate(prediction, request, steps, progress_of(name))
        bubble = bubble_percent(prediction, prediction.step_ms, measured.step_ms)
        print(f"{name}: {measured.step_ms / prediction.step_ms:.3f} of the predicted step")
        title = f"{name}, measured: bubble {bubble:.1f} %, {measured.step_ms:,.0f} ms a step"
        rows.append((title, spans_of_records(measured.records[-1:])))
    pictures.write(path, f"{PICTURED}, {DEVICES} devices, measured", rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--presets", nargs="+", default=list(SCALES))
    arguments.add_argument("--modes", nargs="+", choices=("async", "sync"), default=["async", "sync"])
    arguments.add_argument("--scale", type=float, help="of time, for all presets; 1 = real time")
    arguments.add_argument("--others", default="llama3.1-8b", help="preset for other systems; none = leave out")
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--groups", type=int, nargs="+", default=[8, 16], help="gradient groups, synchronous")
    arguments.add_argument("--steps", type=int, help="measured in a run (default: 6, or 4 with --links)")
    arguments.add_argument("--links", action="store_true", help="move every byte over throttled links")
    arguments.add_argument("--runs", type=int, default=7, help="with --links")
    arguments.add_argument("--picture", type=Path, help="draw 1F1B and ours in this file, and measure nothing else")
    options = arguments.parse_args()
    if options.picture is not None:
        draw(options.picture, options.steps or 3, 0.02 if options.quick else 1.0)
        return
    options.steps = options.steps or (4 if options.links else 6)
    if options.quick:
        options.presets, options.steps, options.runs, options.groups = ["qwen3-1.7b"], 2, 1, [16]
        for scales in (SCALES, LINK_SCALES):
            scales.update(dict.fromkeys(scales, 0.05))
    what = "links" if options.links else "simulator"
    report = Report(f"Emulation: the real engine against the {what}, on {DEVICES} virtual devices", options.out)
    if options.links:
        report_links(report, options)
    else:
        report_hops(report, options)
    report.close()


if __name__ == "__main__":
    main()
