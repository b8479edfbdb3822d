"""Does the real engine take the time that the simulator predicts?

Each preset's layers are emulated on eight virtual devices (they take their published time, scaled, without computing)
and run through the real engine in real time, by the planner's own plan, asynchronously and synchronously. Then the
schedules of other systems run through the same engine, to see whether they come out in the order that the simulator
gives. Every loss is checked: an emulated layer hands its input on.
"""

from __future__ import annotations

from support.report import Report, parser

from roundpipe.planning import emulation
from roundpipe.planning.costs import load
from roundpipe.planning.schedules import Request, predict

# Such that the shortest layer takes 5 ms or more.
SCALES = {
    "qwen3-1.7b": 1.0,
    "llama3.1-8b": 0.3,
    "gpt-oss-20b": 0.25,
    "qwen3-32b": 0.15,
    "qwen3-235b-lora": 0.15,
}
OTHERS = ["roundpipe", "published", "looped-bfs", "interleaved-1f1b", "1f1b", "gpipe"]


def measure(name: str, preset: str, scale: float, mode: str, microbatches: int, steps: int) -> list[str]:
    costs = load(preset)
    request = Request(
        costs,
        costs.cluster(8),
        microbatches=microbatches,
        mode="sync" if mode == "sync" else "async",
        gradient_groups=0,
    )
    request = emulation.scaled(request, scale)
    prediction = predict(name, request)
    measured = emulation.emulate(prediction, request, steps, lambda done, total: None)
    return [
        preset,
        f"{scale:g}",
        mode,
        name,
        f"{prediction.step_ms:.1f}",
        f"{measured.step_ms:.1f}",
        f"{measured.step_ms / prediction.step_ms:.4f}",
        f"{prediction.bubble_percent:.2f}",
        f"{100 * (1 - (1 - prediction.bubble_percent / 100) * prediction.step_ms / measured.step_ms):.2f}",
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--presets", nargs="+", default=list(SCALES))
    arguments.add_argument("--others", default="llama3.1-8b", help="preset for the schedules of other systems")
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=6, help="measured, after two left out")
    options = arguments.parse_args()
    names = OTHERS
    if options.quick:
        options.presets, options.steps, names = ["qwen3-1.7b"], 2, ["1f1b"]
        SCALES.update(dict.fromkeys(SCALES, 0.05))
    report = Report("Emulation: the real engine against the simulator, on eight virtual devices", options.out)
    report(
        f"{options.microbatches} microbatches; asynchronous: pace of {options.steps} steps after two left out; "
        "synchronous: median of single steps. Times in ms, scaled as given."
    )
    report("")
    header = ["costs", "scale", "steps", "schedule", "predicted", "measured", "measured / predicted"]
    header += ["bubble % predicted", "bubble % measured"]
    rows = [
        measure("roundpipe", preset, SCALES[preset], mode, options.microbatches, options.steps)
        for preset in options.presets
        for mode in ("async", "sync")
    ]
    report.table(header, rows)
    report("The same engine with the schedules of other systems, synchronous:")
    report("")
    scale = SCALES[options.others]
    report.table(
        header,
        [measure(name, options.others, scale, "sync", options.microbatches, min(3, options.steps)) for name in names],
    )
    report.close()


if __name__ == "__main__":
    main()
