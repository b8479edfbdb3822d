"""Schedules of other systems beside ours, in one simulator, and tables of what is predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roundpipe import _core
from roundpipe.plan import BASELINES
from roundpipe.plan.schedules import Prediction, Request, choose, over_links, percent, predict_choice

_WIDEST_TABLE = 250
_IN_CORE = dict(
    zip(
        BASELINES,
        (
            _core.Baseline.PUBLISHED,
            _core.Baseline.GPIPE,
            _core.Baseline.ONE_FORWARD_ONE_BACK,
            _core.Baseline.INTERLEAVED,
            _core.Baseline.LOOPED_BFS,
        ),
        strict=True,
    )
)


@dataclasses.dataclass(frozen=True)
class Impossible:
    """A schedule that does not exist for the sizes of a request, and why."""

    name: str
    reason: str

    def document(self) -> dict[str, Any]:
        """The schedule for JSON."""
        return {"schedule": self.name, "impossible": self.reason}


class ImpossibleScheduleError(ValueError):
    """A schedule to compare with does not exist for the sizes of a request; the message says why."""


def predict(name: str, request: Request) -> Prediction:
    """Simulates our schedule, "roundpipe", or one of `BASELINES`.

    Raises:
        ImpossibleScheduleError: the schedule to compare with does not exist for these sizes.
        ValueError: our planner finds no plan within the request's limits, or a step is too long to be simulated.
    """
    if name == "roundpipe":
        return predict_choice(name, request, choose(request))
    if request.links is not None and name != "published":
        raise ValueError(
            f"[schedule] --links does not know '{name}', expected published: stages of other schedules stay on their "
            "devices"
        )
    plans = _plans(name, request)
    links = None if request.links is None else over_links(plans, request)
    if links is None:
        # Other systems recompute when the gradient arrives, and none recomputes the head.
        costs = request.costs.layers
        if not request.through_engine:
            costs = [*costs[:-1], _without_recompute(costs[-1])]
        timeline = _core.simulate(plans, costs, request.cluster, request.rules(late_recompute=name != "published"))
    else:
        timeline = links.timeline
    return Prediction(
        name=name,
        step_ms=timeline.steady_step_ms,
        bubble_percent=percent(timeline.steady_bubble),
        traffic_ratio=_core.traffic_ratio(plans[0], request.costs.layers) if name == "published" else 0.0,
        plans=plans,
        timeline=timeline,
        links=links,
    )


def each_possible(names: Sequence[str], request: Request) -> list[Prediction | Impossible]:
    """The predictions of these schedules, and the reason for those that are impossible."""
    results: list[Prediction | Impossible] = []
    for name in names:
        try:
            results.append(predict(name, request))
        except ImpossibleScheduleError as error:
            results.append(Impossible(name, str(error).partition("] ")[2]))
    return results


def _plans(name: str, request: Request) -> list[_core.Plan]:
    """A plan for each step; the published one begins on the device after the last step's."""
    try:
        plans = [_plan(name, request, 0)]
        steps = request.steps(plans[0])
    except ValueError as error:
        raise ImpossibleScheduleError(str(error)) from None
    turn = len(plans[0].jobs) if name == "published" else 0
    for step in range(1, steps):
        plans.append(_plan(name, request, turn * step % request.devices) if turn else plans[0])
    return plans


def _plan(name: str, request: Request, first_device: int) -> _core.Plan:
    if len(request.costs.layers) == 1 and name != "published":
        raise ValueError(
            f"[schedule] {name} puts the layers below the head on the devices, expected at least two layers"
        )
    sizes = request.costs.stages
    if sizes is None or len(sizes.pipeline) != request.devices:
        sizes = _core.default_sizes(request.costs.layers, request.devices)
    return _core.baseline_plan(
        _IN_CORE[name],
        sizes,
        len(request.costs.layers),
        request.devices,
        request.microbatches,
        first_device=first_device,
    )


def _without_recompute(cost: _core.LayerCost) -> _core.LayerCost:
    return _core.LayerCost(
        forward_ms=cost.forward_ms, backward_ms=cost.backward_ms, recompute_ms=0.0, trained=cost.trained
    )


# --- tables ---


def print_schedules(results: Sequence[Prediction | Impossible]) -> None:
    """Prints one line for each schedule; that of an impossible one says why."""
    rows = [result if isinstance(result, Impossible) else _row(result) for result in results]
    print_table("schedule", ["step ms", "bubble %", "weight traffic"], rows)


def _row(prediction: Prediction) -> list[str]:
    traffic = f"{prediction.traffic_ratio:.2f} x" if prediction.traffic_ratio else "stays"
    return [prediction.name, f"{prediction.step_ms:,.1f}", f"{prediction.bubble_percent:.2f}", traffic]


def print_table(of_rows: str, columns: list[str], rows: Sequence[list[str] | Impossible], title: str = "") -> None:
    """Prints a table. `of_rows`: the name of the first column."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) or None, title_justify="left")
    table.add_column(of_rows)
    for column in columns:
        table.add_column(column, justify="right")
    if not all(isinstance(row, list) for row in rows):
        table.add_column("impossible because", no_wrap=True)
    for row in rows:
        if isinstance(row, list):
            table.add_row(*row)
        else:
            table.add_row(row.name, *["-"] * len(columns), escape(row.reason))
    console = Console()
    # A reason stays on its line, however narrow the terminal is.
    console.width = max(console.width, _WIDEST_TABLE)
    console.print(table)
