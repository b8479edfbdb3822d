"""A training step as it was predicted and as it was measured, and what limits it."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from roundpipe import _core
from roundpipe.plan.performance import STAGES_LEGEND
from roundpipe.plan.performance.limits import limit_of, shape_limit

# Of the steps that are measured, and of those that are simulated to a steady state.
_MOST_MEASURED = 16
_FEWEST_MEASURED = 2
_MOST_STEPS, _FEWEST_STEPS = 49, 9
_VISITS = 40_000
# A device's link is slower than the others' below this share of the fastest.
_ALIKE = 0.9
_EFFORT = 20_000_000  # of the search for a plan without a limit of memory


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A training step, predicted and measured; `print` shows it as a table, `document` is for JSON.

    Attributes:
        name: the model's name.
        devices: number of devices.
        microbatches: number of microbatches of the step.
        asynchronous: whether steps are asynchronous.
        plan: the stages, in the notation of `roundpipe plan`.
        predicted_ms: a step in the simulator, from the measured costs and rates.
        measured_ms: the median time from the end of one step to the end of the next.
        measured_steps: how many steps that is the median of.
        predicted_bubble_percent: the devices' idle share of the predicted step.
        measured_bubble_percent: the devices' idle share of the measured steps.
        limited_by: "compute", "links up", "links down", "link of device 1 (up)", "host memory", "optimizer", "memory",
            "fill and drain" or "dependencies".
        compute_ms: the step if all devices computed without a pause.
        unlimited_ms: the predicted step if one resource had no limit, by the resource's name.
        links_gb_per_s: what each device's link reaches, (up, down); 0 = not measured.
        host_gb_per_s: what all links reach together; 0 = they were not seen to slow each other.
        update_gb_per_s: weights that the host's optimizer updates; 0 = not measured.
        hop_latency_ms: of a small value, down and up; 0 = not measured.
        speeds: of each device, relative to the fastest.
    """

    name: str
    devices: int
    microbatches: int
    asynchronous: bool
    plan: str
    predicted_ms: float
    measured_ms: float
    measured_steps: int
    predicted_bubble_percent: float
    measured_bubble_percent: float
    limited_by: str
    compute_ms: float
    unlimited_ms: dict[str, float]
    links_gb_per_s: tuple[tuple[float, float], ...]
    host_gb_per_s: float
    update_gb_per_s: float
    hop_latency_ms: float
    speeds: tuple[float, ...]

    def document(self) -> dict[str, Any]:
        """The report as numbers, texts, lists and dicts of them."""
        fields = dataclasses.asdict(self)
        return fields | {
            "links_gb_per_s": [list(link) for link in self.links_gb_per_s],
            "speeds": list(self.speeds),
        }

    def __str__(self) -> str:
        mode = "async" if self.asynchronous else "sync"
        without = [f"{name} {ms:,.1f} ms" for name, ms in self.unlimited_ms.items()]
        lines = [
            f"{self.name}: {self.devices} devices, {self.microbatches} microbatches, {mode}",
            f"  plan       {self.plan}",
            f"  notation   {STAGES_LEGEND}",
            "             predicted   measured",
            f"  step, ms  {self.predicted_ms:>10,.1f} {self.measured_ms:>10,.1f}",
            f"  bubble, % {self.predicted_bubble_percent:>10.2f} {self.measured_bubble_percent:>10.2f}",
            f"  limited by {self.limited_by}",
            f"  without    {', '.join([f'any pause {self.compute_ms:,.1f} ms', *without])}",
            f"  rates      {', '.join(self._rates())}",
        ]
        return "\n".join(lines)

    def _rates(self) -> list[str]:
        def rate(gb_per_s: float) -> str:
            return f"{gb_per_s:.2f}" if gb_per_s else "?"

        links = dict.fromkeys(f"{rate(up)} up {rate(down)} down" for up, down in self.links_gb_per_s)
        rates = [f"links {' | '.join(links)} GB/s"]
        rates.append(f"host {self.host_gb_per_s:.2f} GB/s" if self.host_gb_per_s else "host no limit seen")
        rates.append(f"optimizer {rate(self.update_gb_per_s)} GB/s")
        if len(set(self.speeds)) > 1:
            rates.append("speeds " + " ".join(f"{speed:.2f}" for speed in self.speeds))
        return rates


@dataclasses.dataclass(frozen=True)
class _Simulated:
    """A plan and the machine that it is simulated on; `unlimited` are rates that count as infinite."""

    plan: _core.Plan
    places: bool
    costs: list[_core.LayerCost]
    machine: _core.MeasuredMachine
    asynchronous: bool
    gradient_groups: int

    def rates(self, unlimited: str = "") -> dict[str, float]:
        rates = {
            "links up": self.machine.link_up_gb_per_s,
            "links down": self.machine.link_down_gb_per_s,
            "host memory": self.machine.host_gb_per_s,
            "optimizer": self.machine.update_gb_per_s,
        }
        return {name: 0.0 if name == unlimited else rate for name, rate in rates.items()}

    def cluster(self, unlimited: str = "") -> _core.Cluster:
        rates = self.rates(unlimited)
        return _core.Cluster(
            devices=[(speed, 0) for speed, _ in self.machine.devices],
            link_up_gb_per_s=rates["links up"],
            link_down_gb_per_s=rates["links down"],
            host_gb_per_s=rates["host memory"],
            hop_latency_ms=self.machine.hop_latency_ms,
        )

    def rules(self) -> _core.TimingRules:
        return _core.TimingRules(asynchronous=self.asynchronous, hop_on_same_device=True)

    def plans(self) -> list[_core.Plan]:
        """As the engine places them."""
        visits = len(self.plan.jobs) * self.plan.microbatches
        steps = max(_FEWEST_STEPS, min(_MOST_STEPS, _VISITS // max(1, visits)))
        if not self.places:
            return [self.plan] * steps
        return _core.place_over_links(self.plan, self.costs, self.cluster(), rules=self.rules(), steps=steps)

    def timeline(self, unlimited: str = "") -> _core.Timeline:
        cluster = self.cluster(unlimited)
        if not any(self.rates().values()):
            return _core.simulate(self.plans(), self.costs, cluster, self.rules())
        update = self.rates(unlimited)["optimizer"]
        return _core.simulate_links(
            self.plans(),
            self.costs,
            cluster,
            rules=self.rules(),
            chunk_bytes=self.machine.chunk_bytes,
            priorities=self.machine.priorities,
            update_gb_per_s=update,
        ).timeline

    def unlimited_ms(self) -> dict[str, float]:
        """The step without the limit of each resource that has one."""
        return {
            name: self.timeline(unlimited=name).steady_step_ms for name, rate in self.rates().items() if rate
        } | self._without_memory_limit()

    def _without_memory_limit(self) -> dict[str, float]:
        if not self.places or not any(memory for _, memory in self.machine.devices):
            return {}
        best = _core.search(
            self.costs,
            self.cluster(),
            microbatches=self.plan.microbatches,
            rules=self.rules(),
            first_backward_layer=self.plan.first_backward_layer,
            gradient_groups=self.gradient_groups,
            interleave=any(job.order >= 1 for job in self.plan.jobs),
            max_fused_layers=len(self.costs),
            effort=_EFFORT,
            over_links=any(self.rates().values()),
            chunk_bytes=self.machine.chunk_bytes,
            priorities=self.machine.priorities,
            update_gb_per_s=self.machine.update_gb_per_s,
        )[0]
        return {"memory": dataclasses.replace(self, plan=best.recipe).timeline().steady_step_ms}

    def compute_ms(self) -> float:
        """A step in which all devices compute without a pause."""
        work = 0.0
        for job in self.plan.jobs:
            for layer in range(job.layers.first, job.layers.last):
                cost = self.costs[layer]
                again = cost.forward_ms if cost.recompute_ms is None else cost.recompute_ms
                once = again if job.phase == "backward" else cost.forward_ms
                once += 0.0 if job.phase == "forward" else cost.backward_ms
                work += once * (job.microbatches.last - job.microbatches.first)
        return work / sum(speed for speed, _ in self.machine.devices)


def _limit(step_ms: float, compute_ms: float, unlimited_ms: dict[str, float], machine: _core.MeasuredMachine) -> str:
    """As `limit_of`, with the device whose link is slower than the others."""
    name = limit_of(step_ms, compute_ms, unlimited_ms)
    ways: dict[str, tuple[str, Callable[[_core.LinkRates], float]]] = {
        "links up": ("up", lambda link: link.up_gb_per_s),
        "links down": ("down", lambda link: link.down_gb_per_s),
    }
    if name not in ways:
        return name
    way, rate_of = ways[name]
    rates = [rate_of(link) for link in machine.links]
    slow = [device for device, rate in enumerate(rates) if 0 < rate < _ALIKE * max(rates)]
    return f"link of device {slow[0]} ({way})" if len(slow) == 1 else name


def report(pipeline: _core.Pipeline, name: str) -> StepReport:
    """Compares the steps of a model's last plan with what the simulator says of it.

    Raises:
        ValueError: too few training steps have been made and measured.
    """
    plan = pipeline.last_step_plan()
    # Reads what finished calls have measured.
    pipeline.raise_pending()
    steps = [step for step in pipeline.measured_steps() if plan is not None and step.microbatches == plan.microbatches]
    if plan is None or not pipeline.knows_costs() or len(steps) <= _FEWEST_MEASURED:
        raise ValueError(
            f"[step_report] {len(steps)} training steps of {name} have been measured, expected more than "
            f"{_FEWEST_MEASURED}; train a few steps first"
        )
    steps = steps[-_MOST_MEASURED - 1 :]
    measured_ms = statistics.median(b.end_ms - a.end_ms for a, b in itertools.pairwise(steps))
    busy_ms = statistics.median(step.busy_ms for step in steps)
    machine = pipeline.machine()
    costs, groups = pipeline.costs(), pipeline.last_step_groups()
    simulated = _Simulated(plan, pipeline.planned(plan), costs, machine, pipeline.asynchronous, groups)
    timeline = simulated.timeline()
    compute_ms = simulated.compute_ms()
    unlimited = simulated.unlimited_ms()
    return StepReport(
        name=name,
        devices=plan.devices,
        microbatches=plan.microbatches,
        asynchronous=pipeline.asynchronous,
        plan=pipeline.notation(plan),
        predicted_ms=timeline.steady_step_ms,
        measured_ms=measured_ms,
        measured_steps=len(steps) - 1,
        predicted_bubble_percent=max(0.0, 100 * timeline.steady_bubble),
        measured_bubble_percent=100 * (1 - busy_ms / (plan.devices * measured_ms)) if measured_ms > 0 else 0.0,
        limited_by=_limit(timeline.steady_step_ms, compute_ms, unlimited, machine)
        or shape_limit(pipeline.asynchronous),
        compute_ms=compute_ms,
        unlimited_ms=unlimited,
        links_gb_per_s=tuple((link.up_gb_per_s, link.down_gb_per_s) for link in machine.links),
        host_gb_per_s=machine.host_gb_per_s,
        update_gb_per_s=machine.update_gb_per_s,
        hop_latency_ms=machine.hop_latency_ms,
        speeds=tuple(speed for speed, _ in machine.devices),
    )
