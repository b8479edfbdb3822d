"""The `roundpipe simulate` and `roundpipe emulate` commands. The work is imported when one runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from roundpipe import _core
    from roundpipe.planning.costs import CostSet
    from roundpipe.planning.pictures import Span
    from roundpipe.planning.schedules import Prediction, Request

CostsArgument = Annotated[
    str,
    typer.Argument(
        metavar="COSTS",
        help="A cost file, or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora.",
    ),
]
DevicesOption = Annotated[
    int | None, typer.Option(help="Devices. [default: those of the cost file, else 8]", show_default=False)
]
MicrobatchesOption = Annotated[int, typer.Option(help="Microbatches of a step.")]
ModeOption = Annotated[str, typer.Option(help="async (steps overlap, staleness one) or sync.")]
TrafficOption = Annotated[
    float,
    typer.Option(help="Most uploads of weights, as a factor of one visit a direction; 0 = no limit."),
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Memory of each device, such as 24GB. [default: the cost file's]", show_default=False)
]
KeepOption = Annotated[
    int, typer.Option(help="Most last layers that keep their activations instead of recomputing; 1 = the head.")
]
ReplicasOption = Annotated[bool, typer.Option(help="Let devices share a stage, each some of the microbatches.")]
EffortOption = Annotated[
    int | None, typer.Option(help="Of the search, in microbatch visits. [default: about half a second]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
StepsShownOption = Annotated[int, typer.Option(help="Steps that a picture shows.")]
PngOption = Annotated[Path | None, typer.Option(help="Write the timelines to this PNG.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Write the timelines to this HTML page.")]
TraceOption = Annotated[
    Path | None, typer.Option(help="Write the first schedule's timeline for chrome://tracing and Perfetto.")
]


def make_request(
    costs: str | CostSet,
    devices: int | None,
    microbatches: int,
    mode: str,
    max_traffic: float,
    memory: str | None,
    keep: int,
    replicas: bool,
    effort: int | None,
    published_rule: bool = False,
) -> Request:
    """The options of a command, checked."""
    from roundpipe import _core
    from roundpipe.planning.costs import load
    from roundpipe.planning.schedules import Request

    def require(ok: bool, option: str, value: object, expected: str) -> None:
        if not ok:
            raise ValueError(f"[options] --{option} is {value}, expected {expected}")

    require(mode in ("async", "sync"), "mode", mode, "async or sync")
    require(devices is None or 1 <= devices <= 1024, "devices", devices, "1 to 1024")
    require(1 <= microbatches <= 4096, "microbatches", microbatches, "1 to 4096")
    require(max_traffic >= 0, "max-traffic", max_traffic, "0 (no limit) or more")
    require(keep >= 1, "keep", keep, "at least 1")
    require(effort is None or effort >= 0, "effort", effort, "0 or more")
    cost_set = load(costs) if isinstance(costs, str) else costs
    return Request(
        costs=cost_set,
        cluster=cost_set.cluster(devices, None if memory is None else _core.parse_bytes(memory)),
        microbatches=microbatches,
        mode="sync" if mode == "sync" else "async",
        max_traffic=max_traffic,
        published_rule=published_rule,
        keep_layers=keep,
        replicas=replicas,
        effort=effort,
    )


def simulate(
    costs: CostsArgument,
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = 16,
    mode: ModeOption = "async",
    schedule: Annotated[
        str,
        typer.Option(
            help="roundpipe, published, gpipe, 1f1b, interleaved-1f1b, looped-bfs, one-device, or all; "
            "several with commas."
        ),
    ] = "all",
    max_traffic: TrafficOption = 0.0,
    memory: MemoryOption = None,
    keep: KeepOption = 1,
    replicas: ReplicasOption = True,
    published_rule: Annotated[
        bool, typer.Option(help="Time the head as the published simulator does: its forward waits for nothing.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Simulate every byte over the cost file's links, not a fixed hop latency.")
    ] = False,
    update_rate: Annotated[
        float, typer.Option(help="With --links: GB of weights that the host's optimizer updates a second; 0 = at once.")
    ] = 0.0,
    effort: EffortOption = None,
    as_json: JsonOption = False,
    steps_shown: StepsShownOption = 2,
    png: PngOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Predict what a step takes, with our planner's schedule and with those of other systems."""
    from roundpipe.planning.schedules import NAMES, predict

    request = make_request(
        costs, devices, microbatches, mode, max_traffic, memory, keep, replicas, effort, published_rule
    )
    if update_rate < 0:
        raise ValueError(f"[options] --update-rate is {update_rate}, expected 0 (at once) or more")
    if links:
        request.links = request.costs.cluster(request.devices, with_links=True)
        request.update_gb_per_s = update_rate
    names = [name.strip() for name in schedule.split(",")]
    if names == ["all"] and links:
        names = ["roundpipe", "published"]
    elif names == ["all"]:
        names = [name for name in NAMES if name != "one-device"]
        if request.microbatches % request.devices:
            names.remove("interleaved-1f1b")  # not defined for a remainder
    predictions = [predict(name, request) for name in names]
    if as_json:
        typer.echo(json.dumps(_report(request, predictions), indent=2))
    else:
        _print_table(request, predictions)
    write_pictures(
        [(_title(p), _spans(p, steps_shown)) for p in predictions],
        f"{request.costs.name}, {request.devices} devices, {request.microbatches} microbatches, {request.mode}",
        png,
        html,
        trace,
    )


def emulate(
    costs: CostsArgument,
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = 16,
    mode: ModeOption = "async",
    schedule: Annotated[str, typer.Option(help="As for simulate; several with commas.")] = "roundpipe",
    max_traffic: TrafficOption = 0.0,
    memory: MemoryOption = None,
    keep: KeepOption = 1,
    replicas: ReplicasOption = True,
    effort: EffortOption = None,
    steps: Annotated[int, typer.Option(help="Steps to measure, after two left out.")] = 6,
    time_scale: Annotated[float, typer.Option(help="Multiplies every time: 0.5 runs twice as fast.")] = 1.0,
    as_json: JsonOption = False,
    steps_shown: StepsShownOption = 2,
    png: PngOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Run schedules through the real engine in real time, on virtual devices whose layers only take time."""
    from roundpipe.planning import emulation
    from roundpipe.planning.pictures import spans_of_records
    from roundpipe.planning.schedules import NAMES, predict

    if not 1 <= steps <= 10_000:
        raise ValueError(f"[options] --steps is {steps}, expected 1 to 10000")
    if not 0 < time_scale <= 1000:
        raise ValueError(f"[options] --time-scale is {time_scale}, expected a factor above 0")
    names = list(NAMES) if schedule == "all" else [name.strip() for name in schedule.split(",")]
    request = emulation.scaled(
        make_request(costs, devices, microbatches, mode, max_traffic, memory, keep, replicas, effort), time_scale
    )
    rows, results = [], []
    for name in names:
        prediction = predict(name, request)
        with _progress(name, as_json) as report:
            measured = emulation.emulate(prediction, request, steps, report)
        ratio = measured.step_ms / prediction.step_ms
        bubble = 100 * (1 - (1 - prediction.bubble_percent / 100) / ratio)
        results.append(
            {
                "schedule": name,
                "predicted_ms": prediction.step_ms,
                "measured_ms": measured.step_ms,
                "measured_over_predicted": ratio,
                "predicted_bubble_percent": prediction.bubble_percent,
                "measured_bubble_percent": bubble,
            }
        )
        shown = [record for step in measured.records[-steps_shown:] for record in step]
        title = f"{name}, measured: bubble {bubble:.1f} %, {measured.step_ms:,.0f} ms a step"
        rows.append((title, spans_of_records(shown)))
    head = {"costs": request.costs.name, "devices": request.devices, "microbatches": request.microbatches}
    head |= {"mode": mode, "time_scale": time_scale, "steps": steps}
    if as_json:
        typer.echo(json.dumps({**head, "schedules": results}, indent=2))
    else:
        _print_measured(head, results)
    write_pictures(rows, f"{request.costs.name}, {request.devices} devices, measured", png, html, trace)


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_measured(head: dict[str, Any], results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = "{costs}: {devices} devices, {microbatches} microbatches, {mode}, times x {time_scale:g}".format(**head)
    table = Table(title=title, title_justify="left")
    table.add_column("schedule")
    for column in ("predicted ms", "measured ms", "measured / predicted", "bubble % measured"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result["schedule"],
            f"{result['predicted_ms']:,.1f}",
            f"{result['measured_ms']:,.1f}",
            f"{result['measured_over_predicted']:.4f}",
            f"{result['measured_bubble_percent']:.2f}",
        )
    Console().print(table)


def describe_choice(best: _core.PlanChoice, runners_up: list[_core.PlanChoice]) -> dict[str, Any]:
    """What the planner chose and why, for JSON."""
    report: dict[str, Any] = {
        "step_ms": best.step_ms,
        "bubble_percent": 100 * best.bubble,
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


def write_pictures(
    rows: list[tuple[str, list[Span]]], title: str, png: Path | None, html: Path | None, trace: Path | None
) -> None:
    """Writes what was asked for, and says so on the error stream."""
    from roundpipe.planning import pictures

    if png is not None:
        pictures.write_png(png, rows)
    if html is not None:
        pictures.write_html(html, title, rows)
    if trace is not None:
        pictures.write_trace(trace, rows[0][1])
    for path in (png, html, trace):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def _title(prediction: Prediction) -> str:
    return f"{prediction.name}: {prediction.step_ms:,.1f} ms a step, bubble {prediction.bubble_percent:.2f} %"


def _spans(prediction: Prediction, steps: int) -> list[Span]:
    from roundpipe.planning.pictures import spans_of, spans_of_transfers

    spans = spans_of(prediction.timeline, prediction.plans, range(steps))
    return spans if prediction.links is None else spans + spans_of_transfers(prediction.links, range(steps))


def _report(request: Request, predictions: list[Prediction]) -> dict[str, Any]:
    schedules = []
    for prediction in predictions:
        entry: dict[str, Any] = {
            "schedule": prediction.name,
            "step_ms": prediction.step_ms,
            "bubble_percent": prediction.bubble_percent,
            "traffic_ratio": prediction.traffic_ratio,
        }
        if prediction.choice is not None:
            entry["plan"] = describe_choice(prediction.choice, prediction.runners_up)
        schedules.append(entry)
    return {
        "costs": request.costs.name,
        "devices": request.devices,
        "microbatches": request.microbatches,
        "mode": request.mode,
        "schedules": schedules,
    }


def _print_table(request: Request, predictions: list[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{request.costs.name}: {request.devices} devices, {request.microbatches} microbatches, {request.mode}",
        title_justify="left",
    )
    table.add_column("schedule")
    for column in ("step ms", "bubble %", "weight traffic"):
        table.add_column(column, justify="right")
    for prediction in predictions:
        traffic = f"{prediction.traffic_ratio:.2f} x" if prediction.traffic_ratio else "stays"
        table.add_row(prediction.name, f"{prediction.step_ms:,.1f}", f"{prediction.bubble_percent:.2f}", traffic)
    console = Console()
    console.print(table)
    for prediction in predictions:
        if prediction.choice is not None:
            console.print(f"{prediction.name}: {prediction.choice.cut}", highlight=False, soft_wrap=True)
