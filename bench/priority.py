"""What do priorities on the links gain over moving things in the order in which they are asked for?

Two presets' layers are emulated on eight virtual devices whose links are throttled: weights, gradients and activations
of scaled sizes are really copied, at scaled bandwidths, by the real engine, asynchronously. The schedule is the
published one, a stage's microbatches in one job or in two, dealt to the devices in turn from step to step. The same
plans go through the simulator, and both stand beside a study of the same question, made with a simulator of its own.
Every loss is checked: an emulated layer hands its input on.
"""

from __future__ import annotations

import dataclasses
import sys

from support import emulation
from support.presets import TRAFFIC
from support.report import Report, parser

from roundpipe import _core
from roundpipe.plan.costs import load
from roundpipe.plan.schedules import Prediction, Request

DEVICES = 8
MICROBATCHES = 16
CHUNK_BYTES = 64_000_000
# Until the pace is steady; in the simulator, the same steps give its pace within 0.1 points, or 0.9 when first come.
WARM_UP = 4
SIMULATED_STEPS = 80


@dataclasses.dataclass
class Case:
    """What to run, how fast its time runs, and the idle percentages in the study, first come first served and urgent.

    Attributes:
        rounds: a stage's microbatches are split into so many jobs.
    """

    preset: str
    rounds: int
    time_factor: float
    study: tuple[float, float]


# The shortest layer takes 5 ms or more. Where jobs have as many microbatches as there are devices, no hop is hidden,
# and no wake-up of a thread: the preset with the shortest jobs then gets 8 ms.
CASES = [
    Case("gpt-oss-20b", 1, 0.25, (5.4, 1.3)),
    Case("qwen3-235b-lora", 1, 0.15, (11.8, 0.04)),
    Case("gpt-oss-20b", 2, 0.25, (16.2, 6.8)),
    Case("qwen3-235b-lora", 2, 0.2, (23.9, 2.8)),
]


def plans_of(case: Case, request: Request, steps: int) -> list[_core.Plan]:
    """The published stages, dealt to the devices in turn from step to step."""
    layers = len(request.costs.layers)
    stages = request.costs.stages or _core.default_sizes(request.costs.layers, DEVICES)
    per_round = MICROBATCHES // case.rounds
    one = _core.baseline_plan(_core.Baseline.PUBLISHED, stages, layers, DEVICES, DEVICES)
    jobs = [
        (job.phase, job.layers.first, job.layers.last, at * per_round, (at + 1) * per_round)
        for at in range(case.rounds)
        for job in one.jobs
    ]
    plans = []
    for step in range(steps):
        first = step * len(jobs)
        placed = [(*job, (first + place) % DEVICES, 0.0) for place, job in enumerate(jobs)]
        plans.append(_core.Plan(layers, MICROBATCHES, DEVICES, 0, placed))
    return plans


def measure(case: Case, priorities: bool, steps: int) -> tuple[float, float]:
    """Idle percentages: simulated and measured."""
    costs = load(case.preset)
    request = Request(costs, costs.cluster(DEVICES), microbatches=MICROBATCHES)
    plans = plans_of(case, request, SIMULATED_STEPS)
    chunk_bytes = CHUNK_BYTES if priorities else 0
    simulated = _core.simulate_links(
        plans,
        costs.layers,
        costs.cluster(DEVICES, with_links=True),
        rules=request.rules(),
        priorities=priorities,
        chunk_bytes=chunk_bytes,
    ).timeline
    work_ms = (1 - simulated.steady_bubble) * simulated.steady_step_ms * case.time_factor
    size_factor = case.time_factor * TRAFFIC
    name = f"{case.preset}, rounds: {case.rounds}, {'priorities' if priorities else 'first come'}"
    links = emulation.Links(costs.rates["link_up_gb_per_s"], costs.rates["host_gb_per_s"], priorities, chunk_bytes)
    measured = emulation.emulate(
        Prediction(name, simulated.steady_step_ms, 100 * simulated.steady_bubble, 0.0, plans, simulated),
        emulation.scaled(request, case.time_factor, size_factor),
        steps,
        lambda done, total: print(f"{name}: step {done} of {total}", file=sys.stderr, flush=True),
        links=links.scaled(case.time_factor, size_factor),
        warm_up=WARM_UP,
    )
    return 100 * simulated.steady_bubble, 100 * (1 - work_ms / measured.step_ms)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--presets", nargs="+", default=sorted({case.preset for case in CASES}))
    arguments.add_argument("--steps", type=int, default=8, help=f"measured, after {WARM_UP} left out")
    options = arguments.parse_args()
    cases = [case for case in CASES if case.preset in options.presets]
    if options.quick:
        cases, options.steps = [dataclasses.replace(cases[0], time_factor=0.02)], 2
    report = Report("Priorities on the links: the real engine, the simulator and the study", options.out)
    report(
        f"{DEVICES} virtual devices, {MICROBATCHES} microbatches, asynchronous; pace of {options.steps} steps after "
        f"{WARM_UP} left out. Links of {1000 * 25 * TRAFFIC:g} MB/s each way, {1000 * 200 * TRAFFIC:g} MB/s for all "
        f"together, which stand for 25 and 200 GB/s; times and sizes scaled alike. Idle time of the devices in percent."
    )
    report("")
    rows = []
    for case in cases:
        for priorities in (False, True):
            study = case.study[priorities]
            simulated, measured = measure(case, priorities, options.steps)
            rows.append(
                [
                    case.preset,
                    f"{case.time_factor:g}",
                    str(MICROBATCHES // case.rounds),
                    "priorities, 64 MB chunks" if priorities else "first come, whole",
                    f"{study:g}",
                    f"{simulated:.2f}",
                    f"{measured:.2f}",
                    f"{measured - study:+.2f}",
                    f"{measured - simulated:+.2f}",
                ]
            )
    header = ["costs", "scale", "microbatches a job", "links", "study", "simulated", "measured"]
    report.table([*header, "measured - study", "measured - simulated"], rows)
    report.close()


if __name__ == "__main__":
    main()
