"""Predicts the time of a step by our planner's schedule."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from roundpipe import _core
from roundpipe.plan.costs import CostSet

# Asynchronous steps until their pace is steady; the pace is measured over the second half.
_STEADY_STEPS = 193
_FEWEST_STEPS = 17
# Together about a minute and a gigabyte: the check holds a time for each job and each microbatch.
_MOST_CELLS = 120_000_000
_MOST_CHUNKS = 6_000_000
_CHUNK_BYTES = 64_000_000

Mode = Literal["async", "sync"]
# Of a step's time: less is not worth other bits of gradients.
_WORTH_GROUPS = 0.001


@dataclasses.dataclass
class Request:
    """A schedule request and its options.

    Attributes:
        mode: "async" repeats steps to the steady state, "sync" runs one step by itself.
        max_traffic: limit of weight traffic, as a factor of one visit in each direction; 0 = no limit.
        keep_layers: largest number of layers whose activations the fused stage may keep instead of recomputing; 1 = the
            head; 0 = as training does: as many as fit on one device, and on up to four that share gradient
            groups, else the head.
        replicas: whether stages may be split over microbatch ranges.
        gradient_groups: consecutive groups of microbatches whose gradients a step sums by themselves; replicas of a
            backward stage with gradients cover whole groups. 0 = they cut anywhere.
        single_backward_layers: whether each backward stage but the fused one has one layer.
        max_waiting: limit of what waits on the host between stages, in bytes; 0 = no limit.
        effort: limit of the search, in microbatch visits.
        links: the same machine with its bandwidths, to simulate every byte; None = a fixed hop latency.
        update_gb_per_s: weight bytes that the host's optimizer updates per second, in 1e9, with `links`; 0 = no limit.
        update_traffic: bytes of the host's memory that an update reads and writes for each byte of weights. With
            `links`, they share the host's bandwidth; 0 = they are not counted.
        resident_bytes: of frozen weights that each device keeps instead of moving them again, with `links`.
        interleave: whether the backward of a step may fall behind the forward of the next.
        through_engine: predict how our engine runs a schedule: values hop even when they stay on a device, because they
            go through the host; recompute comes early; and the head is recomputed unless it is fused.
    """

    costs: CostSet
    cluster: _core.Cluster
    microbatches: int
    mode: Mode = "async"
    max_traffic: float = 0.0
    keep_layers: int = 0
    replicas: bool = True
    gradient_groups: int = 1
    single_backward_layers: bool = False
    max_waiting: int = 0
    effort: int | None = None
    through_engine: bool = False
    interleave: bool = True
    links: _core.Cluster | None = None
    update_gb_per_s: float = 0.0
    update_traffic: float = 0.0
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"[schedule] microbatches is {self.microbatches}, expected at least 1")

    def with_groups(self, groups: int) -> Request:
        """The same request with so many gradient groups."""
        return dataclasses.replace(self, gradient_groups=groups)

    @property
    def devices(self) -> int:
        return len(self.cluster)

    def memory_of_each(self) -> list[int]:
        """The memory of each device that the costs name; 0 = not limited."""
        return [size for _, size in self._named_devices()]

    def speed_of_each(self) -> list[float]:
        """The speed of each device that the costs name."""
        return [speed for speed, _ in self._named_devices()]

    def _named_devices(self) -> list[tuple[float, int]]:
        named = self.costs.devices or [(1.0, 0)]
        return named if len(named) == self.devices else named[:1] * self.devices

    def steps(self, plan: _core.Plan) -> int:
        """How many steps to simulate, of which `plan` is the first: one synchronous, or many to a steady state."""
        return steps_to_simulate(
            plan,
            self.costs.layers,
            self.microbatches,
            repeated=self.mode == "async",
            with_links=self.links is not None,
        )

    def rules(self, late_recompute: bool = False) -> _core.TimingRules:
        return _core.TimingRules(
            asynchronous=self.mode == "async",
            late_recompute=late_recompute and not self.through_engine,
            hop_on_same_device=self.through_engine,
        )


@dataclasses.dataclass
class Prediction:
    """One schedule and its simulation.

    Attributes:
        traffic_ratio: uploads of weights over one visit in each direction; 0 if stages stay on their devices.
        plans: one for each simulated step.
        choice: our planner's choice.
        runners_up: the planner's next choices.
        links: the simulation of every byte; None = a fixed hop latency.
        gradient_groups: of the request.
    """

    name: str
    step_ms: float
    bubble_percent: float
    traffic_ratio: float
    plans: list[_core.Plan]
    timeline: _core.Timeline
    choice: _core.PlanChoice | None = None
    runners_up: list[_core.PlanChoice] = dataclasses.field(default_factory=list)
    links: _core.LinkTimeline | None = None
    gradient_groups: int = 1

    def title(self) -> str:
        """Of a picture."""
        return f"{self.name}: {self.step_ms:,.1f} ms a step, bubble {self.bubble_percent:.2f} %"

    def document(self) -> dict[str, Any]:
        """The prediction for JSON."""
        entry: dict[str, Any] = {
            "schedule": self.name,
            "step_ms": self.step_ms,
            "bubble_percent": self.bubble_percent,
            "traffic_ratio": self.traffic_ratio,
        }
        if self.choice is None:
            return entry
        plan = describe_choice(self.choice, self.runners_up)
        # One time for a step, though the planner clocks fewer of them.
        plan |= {"step_ms": self.step_ms, "bubble_percent": self.bubble_percent}
        return entry | {"gradient_groups": self.gradient_groups, "plan": plan}


def describe_choice(best: _core.PlanChoice, runners_up: list[_core.PlanChoice]) -> dict[str, Any]:
    """What the planner chose and why, with its own times, for JSON."""
    report: dict[str, Any] = {
        "step_ms": best.step_ms,
        "bubble_percent": percent(best.bubble),
        "traffic_ratio": best.traffic,
        "limit": best.limit,
        "interleave": best.interleave,
        "forward": _stages(best.forward),
        "backward": _stages(best.backward),
        "summary": best.cut,
    }
    if runners_up:
        report["next_best"] = {
            "step_ms": runners_up[0].step_ms,
            "traffic_ratio": runners_up[0].traffic,
            "summary": runners_up[0].cut,
        }
    return report


def _stages(stages: list[_core.CutStage]) -> list[dict[str, Any]]:
    return [{"layers": [stage.layers.first, stage.layers.last], "replicas": stage.replicas} for stage in stages]


def choose(request: Request, mode: _core.PlanMode = _core.PlanMode.FUSED) -> list[_core.PlanChoice]:
    """The planner's choices, best first; with links, rated by the simulation of every byte."""
    may_keep = _core.may_keep_layers(request.devices, request.gradient_groups)
    return _core.search(
        request.costs.layers,
        request.cluster if request.links is None else request.links,
        microbatches=request.microbatches,
        mode=mode,
        rules=request.rules(),
        first_backward_layer=request.costs.first_backward_layer,
        max_traffic=request.max_traffic,
        replicas=request.replicas,
        gradient_groups=request.gradient_groups,
        interleave=request.interleave,
        max_fused_layers=request.keep_layers or (len(request.costs.layers) if may_keep else 1),
        single_backward_layers=request.single_backward_layers,
        max_waiting_bytes=request.max_waiting,
        effort=_core.SEARCH_EFFORT if request.effort is None else request.effort,
        over_links=request.links is not None,
        update_gb_per_s=request.update_gb_per_s,
        update_traffic=request.update_traffic,
    )


def choose_with_more_groups(request: Request, best: _core.PlanChoice) -> tuple[Request, list[_core.PlanChoice]] | None:
    """The request with as many gradient groups as shorten the step of `best`, and the planner's choices for it.

    Returns:
        None if the step is not shorter by 0.1 percent, or if `best` is not of one group.
    """
    trains_weights = any(cost.trained for cost in request.costs.layers[request.costs.first_backward_layer :])
    if request.gradient_groups != 1 or not request.replicas or request.devices == 1 or not trains_weights:
        return None
    if best.step_ms <= 0:
        return None
    most = request.with_groups(request.microbatches)
    choices = choose(most)
    if choices[0].step_ms > best.step_ms * (1 - _WORTH_GROUPS):
        return None
    needed = max(stage.replicas for stage in choices[0].backward)
    if 1 < needed < request.microbatches:
        fewer = request.with_groups(needed)
        alike = choose(fewer)
        if alike[0].step_ms <= choices[0].step_ms * (1 + _WORTH_GROUPS):
            return fewer, alike
    return most, choices


def placed(choice: _core.PlanChoice, request: Request, steps: int) -> list[_core.Plan]:
    """A choice with devices, one plan a step."""
    if request.links is not None:
        return _core.place_over_links(
            choice.recipe, request.costs.layers, request.links, rules=request.rules(), steps=steps
        )
    placer = _core.Placer(choice.recipe, request.costs.layers, request.cluster, request.rules())
    return [placer.next() for _ in range(steps)]


def percent(bubble: float) -> float:
    # The pace of many steps is a fit, which may come out slightly faster than their work.
    return max(0.0, 100 * bubble)


def over_links(plans: list[_core.Plan], request: Request) -> _core.LinkTimeline:
    assert request.links is not None
    return _core.simulate_links(
        plans,
        request.costs.layers,
        request.links,
        rules=_core.TimingRules(asynchronous=request.mode == "async"),
        update_gb_per_s=request.update_gb_per_s,
        update_traffic=request.update_traffic,
    )


def predict_choice(name: str, request: Request, choices: list[_core.PlanChoice]) -> Prediction:
    """Simulates the first of our planner's choices for a request, under this name."""
    choice, *runners_up = choices
    plans = placed(choice, request, request.steps(choice.recipe))
    links = None if request.links is None else over_links(plans, request)
    if links is None:
        timeline = _core.simulate(plans, request.costs.layers, request.cluster, request.rules())
    else:
        timeline = links.timeline
    return Prediction(
        name=name,
        step_ms=timeline.steady_step_ms,
        bubble_percent=percent(timeline.steady_bubble),
        traffic_ratio=choice.traffic,
        plans=plans,
        timeline=timeline,
        choice=choice,
        runners_up=runners_up,
        links=links,
        gradient_groups=request.gradient_groups,
    )


def steps_to_simulate(
    plan: _core.Plan, layers: list[_core.LayerCost], microbatches: int, *, repeated: bool, with_links: bool
) -> int:
    """One step, or enough `repeated` ones for the steady state. `plan` is the first of them.

    Raises:
        ValueError: one step is too long to be simulated.
    """
    fewest = _FEWEST_STEPS if repeated else 1
    cells = len(plan.jobs) * microbatches
    steps = _steps(cells, _MOST_CELLS // fewest, fewest, "jobs x microbatches", "take fewer microbatches")
    if with_links:
        moved = sum(2 * cost.weight_bytes + cost.gradient_bytes for cost in layers)
        moved += 2 * microbatches * sum(cost.activation_bytes for cost in layers)
        steps = min(
            steps, _steps(moved // _CHUNK_BYTES, _MOST_CHUNKS // fewest, fewest, "chunks of 64 MB", "leave out --links")
        )
    return steps if repeated else 1


def _steps(of_one_step: int, most: int, fewest: int, what: str, instead: str) -> int:
    """`most`: of one step, if only the `fewest` steps are simulated."""
    if of_one_step > most:
        raise ValueError(f"[schedule] a step has {of_one_step:,} {what}, expected at most {most:,}; {instead}")
    return min(_STEADY_STEPS, fewest * most // max(1, of_one_step))
