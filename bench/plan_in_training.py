"""Does a training run plan as well as `roundpipe plan` does for the same machine?

`roundpipe plan` reads costs and bandwidths from files. A run has to measure them while it trains, and plans within
about a step's time. Here models train whose layers take the time that the files say (scaled, without computing), on
eight or fewer virtual devices whose links are throttled, so every byte takes its time, too. The run measures and plans
by itself. Then the link simulator times the plan that it runs and the one that `roundpipe plan` chooses, both with the
costs and bandwidths of the file, and with the optimizer's rate of the run. Devices have no limit of memory here, and
layers next to the head may keep their activations. Every loss is checked: an emulated layer hands its input on.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from support import emulation
from support.plan_family import cases
from support.presets import LINK_SCALES, TRAFFIC
from support.report import Report, parser

import roundpipe
from roundpipe import _core
from roundpipe.plan.costs import PRESETS, load
from roundpipe.plan.performance.step_report import StepReport
from roundpipe.plan.schedules import Request, choose

# Overlap is planned once most batches came early and the plan has run eight calls; a run searches on after 4, 8 and 12.
STEPS = {"async": 24, "sync": 16}
SIMULATED_STEPS = 97
EVERY_CASE = 4


@dataclasses.dataclass
class Trial:
    """What to train, and how fast its time runs."""

    name: str
    request: Request
    scale: float

    @property
    def words(self) -> str:
        request = self.request
        words = f"{self.name}, {request.devices} devices, {request.microbatches} microbatches, {request.mode}"
        return words + (f", {request.gradient_groups} groups" if request.gradient_groups > 1 else "")


def request_of(request: Request) -> Request:
    """Without a limit of memory, and with as many fused layers as pay, as a run on such devices plans."""
    costs = request.costs
    devices = [(speed, 0) for speed, _ in costs.devices[: request.devices]]
    costs = dataclasses.replace(costs, devices=devices)
    return dataclasses.replace(
        request,
        costs=costs,
        cluster=costs.cluster(None),
        links=costs.cluster(None, with_links=True),
        keep_layers=len(costs.layers),
        update_gb_per_s=0.0,
        update_traffic=0.0,  # the host of virtual devices throttles links only
    )


def trials(quick: bool) -> list[Trial]:
    found = []
    for preset in list(PRESETS)[: 1 if quick else None]:
        costs = load(preset)
        for mode in ("async", "sync"):
            request = Request(costs, costs.cluster(8), 16, mode="sync" if mode == "sync" else "async")
            found.append(Trial(preset, request_of(request), 0.1 if quick else LINK_SCALES[preset]))
    if quick:
        return found
    # Virtual devices are equally fast.
    alike = [case for case in cases() if len(set(case.request.costs.devices)) == 1 and case.request.devices > 1]
    # These layers are short enough unscaled.
    return found + [Trial(case.name, request_of(case.request), 1.0) for case in alike[::EVERY_CASE]]


def train(trial: Trial, steps: int) -> tuple[_core.Plan, StepReport]:
    """Returns the plan that the run ended with, and the report of its steps."""
    request, size_factor = trial.request, trial.scale * TRAFFIC
    rates = request.costs.rates
    links = emulation.Links(rates["link_up_gb_per_s"], rates.get("host_gb_per_s", 0.0))
    scaled = emulation.scaled(request, trial.scale, size_factor)
    model = emulation.emulated(scaled, links=links.scaled(trial.scale, size_factor))
    value_bytes = max(cost.activation_bytes for cost in scaled.costs.layers)
    batch = torch.ones(request.microbatches, max(1, value_bytes // 4))
    target = torch.ones(request.microbatches, 1)
    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=request.microbatches, gradient_groups=min(request.gradient_groups, request.microbatches)
    )
    # Fused, as a step then waits only while two before it are in progress; torch's waits for the one before.
    optimizer = roundpipe.optim.SGD(model, lr=0.0)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (outputs * target).sum()

    pending = []
    for step in range(steps):
        pending.append(model.submit((batch,), label=target, loss_fn=loss_fn, run_config=config))
        model.step(optimizer, request.mode == "async")
        # A batch is given early: the one before it is read afterwards.
        due = pending[-2:-1] if request.mode == "async" else pending[-1:]
        if any(call.loss().item() != batch.numel() for call in due):
            raise SystemExit(f"a loss of {trial.words} is not {batch.numel()}: the input, handed on")
        print(f"{trial.words}: step {step + 1} of {steps}", file=sys.stderr, flush=True)
    model.synchronize()
    return model.last_plan(), model.step_report()


def true_ms(recipe: _core.Plan, request: Request) -> float:
    rules = _core.TimingRules(asynchronous=request.mode == "async", hop_on_same_device=True)
    steps = SIMULATED_STEPS if request.mode == "async" else 1
    assert request.links is not None
    plans = _core.place_over_links(recipe, request.costs.layers, request.links, rules=rules, steps=steps)
    return _core.simulate_links(
        plans, request.costs.layers, request.links, rules=rules, update_gb_per_s=request.update_gb_per_s
    ).timeline.steady_step_ms


def compare(trial: Trial, steps: int) -> tuple[float, list[str]]:
    recipe, run = train(trial, steps)
    request = dataclasses.replace(trial.request, update_gb_per_s=run.update_gb_per_s / TRAFFIC)
    choice = choose(request)[0]
    planned_ms, trained_ms = true_ms(choice.recipe, request), true_ms(recipe, request)
    bound_ms = choice.work_ms / sum(speed for speed, _ in request.costs.devices)
    points = 100 * bound_ms * (1 / planned_ms - 1 / trained_ms)
    return points, [
        trial.words,
        f"{planned_ms:,.1f}",
        f"{trained_ms:,.1f}",
        f"{100 * (1 - bound_ms / planned_ms):.2f}",
        f"{100 * (1 - bound_ms / trained_ms):.2f}",
        f"{points:+.2f}",
        run.plan.replace("|", "/"),
    ]


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("The plan of a training run beside that of `roundpipe plan`", options.out)
    report(
        "Steps in ms and bubbles in percent, predicted by the link simulator from the costs of the files, for the plan "
        f"of `roundpipe plan` and for the one that the run chose after {STEPS['async']} asynchronous or "
        f"{STEPS['sync']} synchronous steps. Both bubbles count as work what the plan of `roundpipe plan` computes, so "
        "a negative one has recomputed less."
    )
    report("")
    rows, worst = [], (float("-inf"), "")
    for trial in trials(options.quick):
        steps = 12 if options.quick else STEPS[trial.request.mode]
        points, row = compare(trial, steps)
        worst = max(worst, (points, trial.words))
        rows.append(row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)
    header = ["case", "plan, ms", "training, ms", "plan, %", "training, %", "points", "the run's plan"]
    report.table(header, rows)
    report(f"Most points that training loses: {worst[0]:+.2f} ({worst[1]}).")
    report("")
    report.close()


if __name__ == "__main__":
    main()
