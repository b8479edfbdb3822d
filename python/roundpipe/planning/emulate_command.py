"""The `roundpipe emulate` command. The work is imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from roundpipe.command_options import After
from roundpipe.planning.options import CostsArgument, PlanningOptions, print_table, require, schedules_in

if TYPE_CHECKING:
    from roundpipe.performance.pictures import Span
    from roundpipe.planning.emulation import Emulation
    from roundpipe.planning.schedules import Impossible, Prediction, Request


@dataclass(frozen=True, kw_only=True)
class EmulateOptions(PlanningOptions):
    """Options of `roundpipe emulate`."""

    schema: ClassVar[str] = "roundpipe.emulate/1"
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
    from roundpipe.planning.schedules import NAMES, Impossible, each_possible

    asked = options.request(load(options.costs))
    request = emulation.scaled(asked, options.time_scale, memory_bytes=options.memory_bytes())
    names = schedules_in(options.schedule, NAMES, NAMES)
    options.refuse_planner_options(names)
    results = each_possible(names, lambda name: _measure(name, request, options))
    measured = [result for result in results if not isinstance(result, Impossible)]
    head = options.document(request) | {"time_scale": options.time_scale, "steps": options.steps}
    if options.as_json:
        typer.echo(json.dumps({**head, "schedules": [result.document() for result in results]}, indent=2))
    else:
        title = f"{request.costs.name}: {options.setting(request)}, times x {options.time_scale:g}"
        _print_measured(title, results)
    if options.draws:
        rows = [(entry.title, entry.spans(options.steps_shown, options.mode)) for entry in measured]
        options.write_pictures(rows, f"{request.costs.name}, {request.devices} devices, measured")


@dataclass(frozen=True)
class _Measured:
    """A schedule's prediction beside what the engine took."""

    prediction: Prediction
    emulation: Emulation

    @property
    def bubble_percent(self) -> float:
        work_ms = (1 - self.prediction.bubble_percent / 100) * self.prediction.step_ms
        return 100 * max(0.0, 1 - work_ms / self.emulation.step_ms)

    @property
    def ratio(self) -> float | None:
        return self.emulation.step_ms / self.prediction.step_ms if self.prediction.step_ms else None

    @property
    def title(self) -> str:
        step_ms = self.emulation.step_ms
        return f"{self.prediction.name}, measured: bubble {self.bubble_percent:.1f} %, {step_ms:,.0f} ms a step"

    def spans(self, steps: int, mode: str) -> list[Span]:
        """What a picture shows: the last synchronous steps, or what ran at the measured pace."""
        from roundpipe.performance.pictures import cut_to_window
        from roundpipe.performance.timeline import spans_of_records

        records, warm_up = self.emulation.records, self.emulation.warm_up
        if mode == "sync":
            return spans_of_records([[record for step in records[-steps:] for record in step]])
        zero_ms = min(record.start_ms for step in records for record in step)
        start_ms = max(record.end_ms for step in records[:warm_up] for record in step) - zero_ms
        # The last two steps drain the pipeline.
        length_ms = max(1, min(steps, len(records) - warm_up - 2)) * self.emulation.step_ms
        spans = spans_of_records([[record for step in records for record in step]])
        return cut_to_window(spans, (start_ms, start_ms + length_ms))

    def row(self) -> list[str]:
        """The schedule's line of the table."""
        return [
            self.prediction.name,
            f"{self.prediction.step_ms:,.1f}",
            f"{self.emulation.step_ms:,.1f}",
            "-" if self.ratio is None else f"{self.ratio:.4f}",
            f"{self.bubble_percent:.2f}",
        ]

    def document(self) -> dict[str, Any]:
        """The schedule for JSON."""
        return {
            "schedule": self.prediction.name,
            "predicted_ms": self.prediction.step_ms,
            "measured_ms": self.emulation.step_ms,
            "measured_over_predicted": self.ratio,
            "predicted_bubble_percent": self.prediction.bubble_percent,
            "measured_bubble_percent": self.bubble_percent,
        }


def _measure(name: str, request: Request, options: EmulateOptions) -> _Measured:
    from roundpipe.planning import emulation
    from roundpipe.planning.schedules import predict

    prediction = predict(name, request)
    with _progress(name, options.as_json) as report:
        return _Measured(prediction, emulation.emulate(prediction, request, options.steps, report))


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_measured(title: str, results: list[_Measured | Impossible]) -> None:
    from roundpipe.planning.schedules import Impossible

    columns = ["predicted ms", "measured ms", "measured / predicted", "bubble % measured"]
    print_table(title, columns, [result if isinstance(result, Impossible) else result.row() for result in results])
