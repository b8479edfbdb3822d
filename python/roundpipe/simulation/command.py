"""The `roundpipe simulate` command. The work is imported when it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from roundpipe.command_options import After
from roundpipe.planning.options import STAGES_LEGEND, CostsArgument, LinkOptions, print_table, schedules_in

if TYPE_CHECKING:
    from roundpipe.performance.pictures import Span
    from roundpipe.planning.schedules import Impossible, Prediction, Request


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(LinkOptions):
    """Options of `roundpipe simulate`."""

    schema: ClassVar[str] = "roundpipe.simulate/1"
    costs: CostsArgument
    schedule: Annotated[
        str,
        typer.Option(
            help="roundpipe, published, gpipe, 1f1b, interleaved-1f1b, looped-bfs, one-device, or all; "
            "several with commas."
        ),
        After("mode"),
    ] = "all"
    published_rule: Annotated[
        bool,
        typer.Option(help="Time the head as the published simulator does: its forward waits for nothing."),
        After("replicas"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "sync":
            self.refuse(["steps_shown"], "--mode async")


def simulate(options: SimulateOptions) -> None:
    """Predict what a step takes, with our planner's schedule and with those of other systems."""
    from roundpipe.planning.costs import load
    from roundpipe.planning.schedules import NAMES, Impossible, each_possible, predict

    request = options.request(load(options.costs))
    request.published_rule = options.published_rule
    every = [name for name in NAMES if name != "one-device"]
    if options.links:
        every = ["roundpipe", "published"]
    names = schedules_in(options.schedule, NAMES, every)
    options.refuse_planner_options(names)
    if options.links or "published" not in names:
        options.refuse(["published_rule"], "published in --schedule and without --links")
    results = each_possible(names, lambda name: predict(name, request))
    for place, result in enumerate(results):
        if result.name != "roundpipe":
            continue
        results[place + 1 : place + 1] = _with_more_groups(result, request)
        break
    predictions = [result for result in results if not isinstance(result, Impossible)]
    if options.as_json:
        schedules = [result.document() for result in results]
        typer.echo(json.dumps({**options.document(request), "schedules": schedules}, indent=2))
    else:
        _print_table(f"{request.costs.name}: {options.setting(request)}", results)
    if options.draws:
        rows = [(_title(prediction), _spans(prediction, options.steps_shown)) for prediction in predictions]
        options.write_pictures(rows, f"{request.costs.name}, {options.setting(request)}")


def _with_more_groups(ours: Prediction | Impossible, request: Request) -> list[Prediction | Impossible]:
    """Our schedule with as many gradient groups as shorten the step; empty if none do."""
    from roundpipe.planning.schedules import Impossible, choose_with_more_groups, predict_choice

    if isinstance(ours, Impossible) or ours.choice is None:
        return []
    more = choose_with_more_groups(request, ours.choice)
    if more is None:
        return []
    with_groups, choices = more
    return [predict_choice(f"{ours.name}, {with_groups.gradient_groups} gradient groups", with_groups, choices)]


def _title(prediction: Prediction) -> str:
    return f"{prediction.name}: {prediction.step_ms:,.1f} ms a step, bubble {prediction.bubble_percent:.2f} %"


def _spans(prediction: Prediction, steps: int) -> list[Span]:
    from roundpipe.planning.pictures import spans_of, spans_of_transfers, steady_window

    window = steady_window(prediction.timeline, prediction.plans, steps)
    spans = spans_of(prediction.timeline, prediction.plans, window)
    return spans if prediction.links is None else spans + spans_of_transfers(prediction.links, window)


def _print_table(title: str, results: list[Prediction | Impossible]) -> None:
    from roundpipe.planning.schedules import Impossible

    rows = [result if isinstance(result, Impossible) else _row(result) for result in results]
    print_table(title, ["step ms", "bubble %", "weight traffic"], rows)
    lines = [
        f"{result.name}: {result.choice.cut}"
        for result in results
        if not isinstance(result, Impossible) and result.choice is not None
    ]
    if lines:
        typer.echo("\n".join([*lines, f"notation: {STAGES_LEGEND}"]))


def _row(prediction: Prediction) -> list[str]:
    traffic = f"{prediction.traffic_ratio:.2f} x" if prediction.traffic_ratio else "stays"
    return [prediction.name, f"{prediction.step_ms:,.1f}", f"{prediction.bubble_percent:.2f}", traffic]
