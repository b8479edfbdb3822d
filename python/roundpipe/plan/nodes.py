"""Predicts a training step on several equal nodes, whose exchange overlaps with the work of their devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roundpipe import _core
from roundpipe.plan.compare import print_table
from roundpipe.plan.costs import RATES
from roundpipe.plan.performance.limits import limit_of, shape_limit
from roundpipe.plan.schedules import Request, percent, placed, steps_to_simulate

_NETWORK, _LATENCY, _UPDATES, _CLIPPING = "network", "network latency", "optimizer", "clipping"
_LINKS = dict(zip(("links up", "links down", "host memory"), RATES, strict=True))


@dataclasses.dataclass(frozen=True)
class Network:
    """What connects the nodes.

    Attributes:
        gb_per_s: of each node, in each direction at once; 0 = infinite.
        latency_ms: of each collective, besides its bytes.
    """

    gb_per_s: float
    latency_ms: float


@dataclasses.dataclass(frozen=True)
class NodesPrediction:
    """A step on so many nodes; `document` is for JSON.

    Attributes:
        step_ms: a step in the steady state, in which every node takes the request's microbatches.
        efficiency_percent: one node's step over this one: the throughput of each node against that of one alone.
        network_busy_ms: of a step, for how long a node's network moves bytes, in each direction.
        exposed_ms: how much longer the step is than with a network without limit or latency.
        limited_by: what shortens the step most if it has no limit: "network", "network latency", "links up",
            "links down", "host memory", "optimizer" or "clipping"; else "compute", "fill and drain" or "dependencies".
        unlimited_ms: the step if one of these had no limit.
        microbatches_per_s: of all nodes.
        tokens_per_s: of all nodes; None if the costs do not say how many tokens a microbatch has.
    """

    nodes: int
    step_ms: float
    bubble_percent: float
    efficiency_percent: float
    network_busy_ms: float
    exposed_ms: float
    limited_by: str
    unlimited_ms: dict[str, float]
    microbatches_per_s: float
    tokens_per_s: float | None
    plans: list[_core.Plan]
    links: _core.LinkTimeline

    def title(self) -> str:
        """Of a picture."""
        count = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{count}: {self.step_ms:,.1f} ms a step, {self.efficiency_percent:.1f} %"

    def document(self) -> dict[str, Any]:
        """The prediction for JSON."""
        shown = (field.name for field in dataclasses.fields(self) if field.name not in ("plans", "links"))
        return {name: getattr(self, name) for name in shown}


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What is simulated; `unlimited` are the names of resources that count as infinite."""

    request: Request
    plans: list[_core.Plan]
    network: Network
    clip: bool
    at_once: bool

    def resources(self, nodes: int) -> list[str]:
        """What has a limit."""
        limited = [name for name, rate in _LINKS.items() if self.request.costs.rates.get(rate)]
        limited += [_UPDATES] if self.request.update_gb_per_s or self.request.update_traffic else []
        limited += [_CLIPPING] if self.clip else []
        if nodes > 1:
            limited += [_NETWORK] if self.network.gb_per_s else []
            limited += [_LATENCY] if self.network.latency_ms else []
        return limited

    def timeline(self, nodes: int, *unlimited: str) -> _core.LinkTimeline:
        costs = self.request.costs
        infinite = {_LINKS[name]: 0.0 for name in unlimited if name in _LINKS}
        machine = dataclasses.replace(costs, rates=costs.rates | infinite)
        return _core.simulate_links(
            self.plans,
            costs.layers,
            machine.cluster(self.request.devices, with_links=True),
            rules=self.request.rules(),
            update_gb_per_s=0.0 if _UPDATES in unlimited else self.request.update_gb_per_s,
            update_traffic=0.0 if _UPDATES in unlimited else self.request.update_traffic,
            nodes=nodes,
            network_gb_per_s=0.0 if _NETWORK in unlimited else self.network.gb_per_s,
            network_latency_ms=0.0 if _LATENCY in unlimited else self.network.latency_ms,
            clipped=self.clip and _CLIPPING not in unlimited,
            at_once=self.at_once,
        )

    def step_ms(self, nodes: int, *unlimited: str) -> float:
        return self.timeline(nodes, *unlimited).timeline.steady_step_ms


def predict_nodes(
    counts: Sequence[int],
    request: Request,
    choice: _core.PlanChoice,
    network: Network,
    *,
    clip: bool,
    at_once: bool,
) -> list[NodesPrediction]:
    """Predicts the steps of a choice of our planner on several nodes, each of which runs that plan.

    Steps repeat to the steady state, also synchronous ones: their forward goes on while weights still arrive.

    Args:
        counts: numbers of nodes.
        request: of one node, with links.
        clip: whether updates wait for the gradients of the whole step.
        at_once: whether gradients are used as they come, in room for a few layers' only.
    """
    steps = steps_to_simulate(choice.recipe, request.costs.layers, request.microbatches, repeated=True, with_links=True)
    setting = _Setting(request, placed(choice, request, steps), network, clip, at_once)
    one_ms = setting.step_ms(1)
    return [_predicted(setting, nodes, one_ms) for nodes in counts]


def _predicted(setting: _Setting, nodes: int, one_ms: float) -> NodesPrediction:
    request = setting.request
    links = setting.timeline(nodes)
    step_ms = links.timeline.steady_step_ms
    unlimited = {name: setting.step_ms(nodes, name) for name in setting.resources(nodes)}
    hidden_ms = setting.step_ms(nodes, _NETWORK, _LATENCY) if nodes > 1 else step_ms
    limit = limit_of(step_ms, step_ms * (1 - links.timeline.steady_bubble), unlimited)
    per_s = 1000 * nodes * request.microbatches / step_ms if step_ms > 0 else 0.0
    return NodesPrediction(
        nodes=nodes,
        step_ms=step_ms,
        bubble_percent=percent(links.timeline.steady_bubble),
        efficiency_percent=100 * one_ms / step_ms if step_ms > 0 else 100.0,
        network_busy_ms=links.network_busy_ms / len(setting.plans),
        exposed_ms=max(0.0, step_ms - hidden_ms),
        limited_by=limit or shape_limit(request.mode == "async"),
        unlimited_ms=unlimited,
        microbatches_per_s=per_s,
        tokens_per_s=None if request.costs.tokens is None else per_s * request.costs.tokens,
        plans=setting.plans,
        links=links,
    )


def print_nodes(predictions: list[NodesPrediction], network: Network, clip: bool) -> None:
    """Prints one line for each number of nodes."""
    speed = f"{8 * network.gb_per_s:,.4g} Gb/s" if network.gb_per_s else "without limit"
    title = f"nodes like this one; network {speed}, latency {network.latency_ms:g} ms{', clipping' if clip else ''}"
    columns = ["step ms", "efficiency %", "network busy ms", "exposed ms", "microbatches/s", "tokens/s", "limited by"]
    rows = [
        [
            str(prediction.nodes),
            f"{prediction.step_ms:,.1f}",
            f"{prediction.efficiency_percent:.1f}",
            f"{prediction.network_busy_ms:,.1f}",
            f"{prediction.exposed_ms:,.1f}",
            f"{prediction.microbatches_per_s:,.2f}",
            "?" if prediction.tokens_per_s is None else f"{prediction.tokens_per_s:,.0f}",
            prediction.limited_by,
        ]
        for prediction in predictions
    ]
    print_table("nodes", columns, rows, title)
