"""The `roundpipe emulate` command. The work is imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from roundpipe.command_options import After
from roundpipe.planning.options import CostsArgument, PlanningOptions, require, schedules_in


@dataclass(frozen=True, kw_only=True)
class EmulateOptions(PlanningOptions):
    """Options of `roundpipe emulate`."""

    costs: CostsArgument
    schedule: Annotated[str, typer.Option(help="As for simulate; several with commas."), After("mode")] = "roundpipe"
    steps: Annotated[int, typer.Option(help="Steps to measure, after two that are left out."), After("effort")] = 6
    time_scale: Annotated[
        float, typer.Option(help="Multiplies every time: 0.5 runs twice as fast."), After("steps")
    ] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.steps <= 10_000, "steps", self.steps, "1 to 10000")
        require(1e-6 <= self.time_scale <= 1000, "time-scale", self.time_scale, "1e-06 to 1000")


def emulate(options: EmulateOptions) -> None:
    """Run schedules through the real engine in real time, on virtual devices whose layers only take time."""
    from roundpipe.planning import emulation
    from roundpipe.planning.costs import load
    from roundpipe.planning.pictures import spans_of_records
    from roundpipe.planning.schedules import NAMES, predict

    request = emulation.scaled(options.request(load(options.costs)), options.time_scale)
    rows, results = [], []
    for name in schedules_in(options.schedule, NAMES, NAMES):
        prediction = predict(name, request)
        with _progress(name, options.as_json) as report:
            measured = emulation.emulate(prediction, request, options.steps, report)
        work_ms = (1 - prediction.bubble_percent / 100) * prediction.step_ms
        bubble = 100 * max(0.0, 1 - work_ms / measured.step_ms)
        results.append(
            {
                "schedule": name,
                "predicted_ms": prediction.step_ms,
                "measured_ms": measured.step_ms,
                "measured_over_predicted": measured.step_ms / prediction.step_ms if prediction.step_ms else None,
                "predicted_bubble_percent": prediction.bubble_percent,
                "measured_bubble_percent": bubble,
            }
        )
        shown = [record for step in measured.records[-options.steps_shown :] for record in step]
        title = f"{name}, measured: bubble {bubble:.1f} %, {measured.step_ms:,.0f} ms a step"
        rows.append((title, spans_of_records(shown)))
    head = options.document(request) | {"time_scale": options.time_scale, "steps": options.steps}
    if options.as_json:
        typer.echo(json.dumps({**head, "schedules": results}, indent=2))
    else:
        title = f"{request.costs.name}: {options.setting(request)}, times x {options.time_scale:g}"
        _print_measured(title, results)
    options.write_pictures(rows, f"{request.costs.name}, {request.devices} devices, measured")


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_measured(title: str, results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    table.add_column("schedule")
    for column in ("predicted ms", "measured ms", "measured / predicted", "bubble % measured"):
        table.add_column(column, justify="right")
    for result in results:
        ratio = result["measured_over_predicted"]
        table.add_row(
            result["schedule"],
            f"{result['predicted_ms']:,.1f}",
            f"{result['measured_ms']:,.1f}",
            "-" if ratio is None else f"{ratio:.4f}",
            f"{result['measured_bubble_percent']:.2f}",
        )
    Console().print(table)
