"""A family of plans that is small enough to try every one, and the greedy rule; written apart from the planner.

Plans are timed by the link simulator, which the unit tests compare with a slower one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from roundpipe import _core
from roundpipe.model.memory.budget import UpdateRule
from roundpipe.plan import costs, machine
from roundpipe.plan.schedules import Request, choose, placed

CASES = Path(__file__).parents[1] / "plan_cases"
INTERLEAVES = (1.0, 1.15, 1.3)
# Simulated steps of every plan, of the best few after that, and of what is reported.
COARSE_STEPS, FINE_STEPS, TRUE_STEPS = 5, 13, 97
BEST_COARSE, BEST_FINE = 24, 6
GREEDY_THRESHOLD = 1.1

Stages = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry of cases.toml."""

    name: str
    request: Request

    @property
    def words(self) -> str:
        request = self.request
        return (
            f"{self.name}, {request.devices} devices, {request.microbatches} microbatches, {request.mode}, "
            f"{request.gradient_groups} gradient groups"
        )


def cases() -> list[Case]:
    """Every committed case."""
    found = []
    for entry in tomllib.loads((CASES / "cases.toml").read_text())["cases"]:
        own = machine.load(CASES / entry["machine"])
        model = own.costs(costs.load(str(CASES / entry["costs"])))
        request = Request(
            model,
            model.cluster(None),
            entry["microbatches"],
            mode=entry["mode"],
            gradient_groups=entry["gradient_groups"],
            links=model.cluster(None, with_links=True),
            update_gb_per_s=own.update_gb_per_s,
            # Cases without a rate have no optimizer.
            update_traffic=UpdateRule("adamw").traffic() if own.update_gb_per_s else 0.0,
        )
        found.append(Case(Path(entry["costs"]).stem, request))
    return found


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds of a step: the planner's plan, the best of the family, and the greedy plan (None: does not fit)."""

    chosen_ms: float
    best_ms: float
    greedy_ms: float | None
    plan: str

    @property
    def ratio(self) -> float:
        return self.chosen_ms / self.best_ms


def compare(case: Case) -> Result:
    family = Family(case.request)
    choice = choose(case.request)[0]
    chosen_ms = family.true_ms(choice.recipe, TRUE_STEPS)
    assert chosen_ms is not None, f"{case.name}: the planner's plan does not fit the devices"
    return Result(chosen_ms, family.best_ms(), family.true_ms(family.greedy(), TRUE_STEPS), choice.cut)


class Family:
    """Plans of a request in which every layer is visited once in each direction, besides replicas of the head."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.layers = request.costs.layers
        self.body = len(self.layers) - 1
        self.rooms = [memory for _, memory in request.costs.devices]

    def best_ms(self) -> float:
        """The best plan of even and exact cuts, with the head whole or shared, and with steps that overlap or not."""
        plans = list(self._plans())
        for steps, count in ((COARSE_STEPS, BEST_COARSE), (FINE_STEPS, BEST_FINE), (TRUE_STEPS, 1)):
            timed = [(self.true_ms(plan, steps), number) for number, plan in enumerate(plans)]
            kept = sorted((ms, number) for ms, number in timed if ms is not None)[:count]
            plans = [plans[number] for _, number in kept]
        return float(kept[0][0])

    def true_ms(self, recipe: _core.Plan, steps: int) -> float | None:
        """The step over the links; None if a job does not fit its device beside the weights of the next one."""
        assert self.request.links is not None
        try:
            plans = placed(_Recipe(recipe), self.request, steps if self.request.mode == "async" else 1)
        except ValueError:
            return None  # a stage that no device has room for
        if not self._fits(plans):
            return None
        rules = _core.TimingRules(asynchronous=self.request.mode == "async")
        timeline = _core.simulate_links(
            plans,
            self.layers,
            self.request.links,
            rules=rules,
            update_gb_per_s=self.request.update_gb_per_s,
            update_traffic=self.request.update_traffic,
        ).timeline
        # The pace of a few steps is a fit, which may come out faster than the devices' work.
        return timeline.steady_step_ms * max(1, 1 - timeline.steady_bubble)

    def greedy(self) -> _core.Plan:
        """Stages filled up to a threshold, from the last layer down for the backward."""

        def fill(first: int, last: int, cost: Callable[[int], float], downward: bool) -> Stages:
            order = list(range(first, last))[:: -1 if downward else 1]
            times = [cost(layer) for layer in order]
            limit = GREEDY_THRESHOLD * max(max(times), sum(times) / self.request.devices) * (1 + 1e-9)
            stages: Stages = []
            filled = 0.0
            for layer, ms in zip(order, times, strict=True):
                if stages and filled + ms <= limit:
                    stages[-1] = (min(stages[-1][0], layer), max(stages[-1][1], layer + 1))
                    filled += ms
                else:
                    stages.append((layer, layer + 1))
                    filled = ms
            return stages

        backward = fill(0, self.body + 1, self._backward_ms, True)
        start = backward[0][0]  # of the stage with the head, which keeps nothing but the head
        forward = fill(0, start, self._forward_ms, False) if start else []
        more = [(start, self.body)] if start < self.body else []
        return self._recipe(forward + more, more + backward[1:], 1, 1.0)

    def _plans(self) -> Iterator[_core.Plan]:
        groups = self.request.gradient_groups or self.request.microbatches
        shared = min(self.request.devices, self.request.microbatches, groups)
        interleaves = INTERLEAVES if self.request.mode == "async" else (1.0,)
        ways: tuple[Callable[[int, bool], Stages | None], ...] = (self._exact, self._even)
        seen = set()
        for way, forward_count, backward_count in itertools.product(
            ways, range(1, self.body + 1), range(1, self.body + 1)
        ):
            forward, backward = way(forward_count, False), way(backward_count, True)
            if forward is None or backward is None or (key := (tuple(forward), tuple(backward))) in seen:
                continue
            seen.add(key)
            for head, interleave in itertools.product({1, shared}, interleaves):
                yield self._recipe(forward, backward[::-1], head, interleave)

    def _forward_ms(self, layer: int) -> float:
        return self.layers[layer].forward_ms

    def _backward_ms(self, layer: int) -> float:
        return self.layers[layer].forward_ms + self.layers[layer].backward_ms

    def _even(self, count: int, backward: bool) -> Stages | None:
        del backward
        ends = [self.body * stage // count for stage in range(count + 1)]
        return list(itertools.pairwise(ends))

    def _exact(self, count: int, backward: bool) -> Stages | None:
        """The least sum of squared times in which each stage of several layers leaves room for another like it."""
        cost = self._backward_ms if backward else self._forward_ms

        @functools.cache
        def least(stages: int, end: int) -> tuple[float, Stages] | None:
            if stages == 0:
                return (0.0, []) if end == 0 else None
            found: tuple[float, Stages] | None = None
            for first in range(end):
                before = least(stages - 1, first)
                if before is None or not self._has_room(first, end, backward):
                    continue
                total = before[0] + sum(cost(layer) for layer in range(first, end)) ** 2
                if found is None or total < found[0]:
                    found = (total, [*before[1], (first, end)])
            return found

        best = least(count, self.body)
        return None if best is None else best[1]

    def _has_room(self, first: int, last: int, backward: bool) -> bool:
        weights = sum(cost.weight_bytes for cost in self.layers[first:last])
        return last == first + 1 or self._bytes(first, last, backward) + weights <= max(self.rooms)

    def _bytes(self, first: int, last: int, backward: bool) -> int:
        """What a job takes on its device."""
        stage = self.layers[first:last]
        values = stage[-1].activation_bytes + (self.layers[first - 1].activation_bytes if first else 0)
        kept = sum(cost.gradient_bytes + cost.saved_bytes for cost in stage) if backward else 0
        return sum(cost.weight_bytes for cost in stage) + kept + 2 * values

    def _fits(self, plans: list[_core.Plan]) -> bool:
        of_device: dict[int, list[tuple[float, _core.Job]]] = {}
        for step, plan in enumerate(plans):
            for job in plan.jobs:
                if len(plans) > 1 and step + job.order >= len(plans):
                    continue  # beside jobs of a step that is not among these
                of_device.setdefault(job.device, []).append((step + job.order, job))
        for device, jobs in of_device.items():
            in_order = [job for _, job in sorted(jobs, key=lambda entry: entry[0])]
            for job, after in itertools.zip_longest(in_order, in_order[1:]):
                own = self._bytes(job.layers.first, job.layers.last, job.phase != "forward")
                alone = after is None or job.layers.last == job.layers.first + 1
                then = 0 if alone else sum(c.weight_bytes for c in self.layers[after.layers.first : after.layers.last])
                if own + then > self.rooms[device]:
                    return False
        return True

    def _recipe(self, forward: Stages, backward: Stages, head: int, interleave: float) -> _core.Plan:
        """`backward`: below the head, last layers first."""
        count = self.request.microbatches
        jobs: list[tuple[str, int, int, int, int, float]] = []
        work = 0.0
        stages = [("forward", stage, 1) for stage in forward]
        stages.append(("fused", (self.body, self.body + 1), head))
        stages += [("backward", stage, 1) for stage in backward]
        for phase, (first, last), replicas in stages:
            sizes = [count // replicas + (part < count % replicas) for part in range(replicas)]
            for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
                jobs.append((phase, first, last, end - size, end, work))
            for layer in range(first, last):
                work += self._forward_ms(layer) + (0 if phase == "forward" else self.layers[layer].backward_ms)
        return _core.Plan(
            self.body + 1,
            count,
            self.request.devices,
            0,
            [(*job, 0, interleave * at / work) for *job, at in jobs],
        )


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What `placed` needs of a choice."""

    recipe: _core.Plan
