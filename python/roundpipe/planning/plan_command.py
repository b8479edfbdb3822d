"""The `roundpipe plan` command: which stages, why, and whether it fits. The work is imported when it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe.planning.commands import (
    DevicesOption,
    EffortOption,
    HtmlOption,
    JsonOption,
    KeepOption,
    MemoryOption,
    MicrobatchesOption,
    PngOption,
    ReplicasOption,
    StepsShownOption,
    TraceOption,
    TrafficOption,
    describe_choice,
    make_request,
    write_pictures,
)

if TYPE_CHECKING:
    from roundpipe.memory.budget import HostPrediction
    from roundpipe.planning.fit import Fit, Layers
    from roundpipe.planning.fit_report import FitReport
    from roundpipe.planning.schedules import Request
    from roundpipe.planning.shapes import ModelShapes

_TOKENS = 8192
_TFLOPS = 100.0
# Of the search, in the planner's microbatch visits, while only memory is asked for.
_QUICK_EFFORT = 2_000_000


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder (or config.json) of a model of transformers, of which only the shapes are read; or a cost "
            "file; or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora.",
        ),
    ],
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = 16,
    mode: Annotated[str, typer.Option(help="async, sync or inference.")] = "async",
    max_traffic: TrafficOption = 0.0,
    memory: MemoryOption = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, such as 512GB. [default: not compared]", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of a model: tokens of a microbatch, in one row. [default: 8192]")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Of a model: full (all weights) or lora (adapters of rank 16). [default: full]"),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Of a model: 1e12 operations a second that a device reaches. [default: 100]"),
    ] = None,
    keep: KeepOption = 1,
    replicas: ReplicasOption = True,
    effort: EffortOption = None,
    as_json: JsonOption = False,
    save: Annotated[Path | None, typer.Option(help="Write the stages to this file, for ModelExecutePlan.load.")] = None,
    steps_shown: StepsShownOption = 2,
    png: PngOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Choose stages, replicas and order for a model and a machine, say why, and whether the model fits.

    Memory is predicted: with bf16 weights, fp32 masters and Adam's moments on the host, and attention that is fused.
    """
    from roundpipe import _core
    from roundpipe.call.execute_plan import ModelExecutePlan
    from roundpipe.planning import fit as fitting
    from roundpipe.planning.costs import load
    from roundpipe.planning.model_folder import is_model
    from roundpipe.planning.schedules import timeline_of

    inference = mode == "inference"
    shapes = None
    if is_model(model):
        shapes = _shapes(model, tokens, train, inference)
        costs = fitting.costs_of_shapes(shapes, _positive("tflops", tflops, _TFLOPS))
        layers = fitting.layers_of_shapes(shapes)
    else:
        for option, value in (("tokens", tokens), ("train", train), ("tflops", tflops)):
            if value is not None:
                raise ValueError(f"[options] --{option} is {value}, expected none: costs are for their own batch")
        costs = load(model)
        layers = fitting.layers_of_costs(costs)
    pace = "async" if inference else mode
    request = make_request(costs, devices, microbatches, pace, max_traffic, memory, keep, replicas, effort)
    plan_mode = _core.PlanMode.INFERENCE if inference else _core.PlanMode.FUSED
    named = min((size for _, size in costs.devices), default=0)
    capacity = named if memory is None else _core.parse_bytes(memory)
    found = fitting.fit(request, layers, capacity, plan_mode)
    best = found.choices[0]
    report = {
        "costs": request.costs.name,
        "devices": request.devices,
        "microbatches": request.microbatches,
        "mode": mode,
        **describe_choice(best, found.choices[1:]),
    }
    host_bytes = None if host_memory is None else _core.parse_bytes(host_memory)
    memory_report = None if inference else _memory(found, layers, shapes, host_bytes, model)
    if as_json:
        document = report if memory_report is None else report | {"memory": memory_report.document()}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print_choice(report, shapes)
        for line in [] if memory_report is None else memory_report.lines():
            typer.echo(line)
    if save is not None:
        stages = ModelExecutePlan()
        stages.fwd_plan = [range(stage.first, stage.last) for stage in best.stages.forward]
        stages.bwd_plan = [range(stage.first, stage.last) for stage in best.stages.backward]
        stages.save(save)
    if png or html or trace:
        timeline, plans = timeline_of(best, found.request)
        from roundpipe.planning.pictures import spans_of

        spans = spans_of(timeline, plans, range(steps_shown))
        title = f"{request.costs.name}, {request.devices} devices, {request.microbatches} microbatches, {mode}"
        write_pictures([(best.cut, spans)], title, png, html, trace)


def _positive(option: str, value: float | None, default: float) -> float:
    if value is not None and not value > 0:
        raise ValueError(f"[options] --{option} is {value}, expected a number above 0")
    return default if value is None else value


def _shapes(model: str, tokens: int | None, train: str | None, inference: bool) -> ModelShapes:
    from roundpipe.planning.model_folder import measure_folder

    if inference:
        raise ValueError("[options] --mode is inference, expected async or sync for a model's folder")
    if train not in (None, "full", "lora"):
        raise ValueError(f"[options] --train is {train}, expected full or lora")
    return measure_folder(model, int(_positive("tokens", tokens, _TOKENS)), "lora" if train == "lora" else "full")


def _memory(found: Fit, layers: Layers, shapes: ModelShapes | None, host_memory: int | None, source: str) -> FitReport:
    from roundpipe.planning.fit_report import FitReport, host_of_costs

    if shapes is None:
        return FitReport(
            found,
            host_of_costs(found.request.costs, found.values, moments_bytes=8),
            host_of_costs(found.request.costs, found.values, moments_bytes=2),
            host_memory,
            unknown="embeddings, and what a layer holds for a moment only; costs do not say (a model's folder does)",
        )
    meta = shapes.model

    def predict(tokens: int) -> Fit:
        from roundpipe.planning import fit as fitting
        from roundpipe.planning.shapes import measure

        longer = measure(meta, tokens, shapes.name)
        costs = fitting.costs_of_shapes(longer, _TFLOPS)
        request: Request = dataclasses.replace(found.request, costs=costs, effort=_QUICK_EFFORT)
        return fitting.fit(request, fitting.layers_of_shapes(longer), found.memory)

    def adapters() -> HostPrediction:
        from roundpipe.planning.model_folder import LORA_RANK
        from roundpipe.planning.shapes import make_model, measure

        config: Any = meta.config
        return measure(make_model(config, LORA_RANK), 1, shapes.name).host(values=found.values)

    return FitReport(
        found,
        shapes.host("float32", found.values),
        shapes.host("8bit", found.values),
        host_memory,
        predict=predict,
        adapters=adapters if shapes.trained == shapes.parameters else None,
    )


def _print_choice(report: dict[str, Any], shapes: ModelShapes | None) -> None:
    typer.echo(
        f"{report['costs']}: {report['devices']} devices, {report['microbatches']} microbatches, {report['mode']}"
    )
    if shapes is not None:
        typer.echo(
            f"  model      {shapes.parameters / 1e9:.2f} G parameters, {shapes.trained / 1e9:.2f} G train, "
            f"{shapes.tokens:,} tokens a microbatch"
        )
    typer.echo(f"  stages     {report['summary']}")
    step = f"{report['step_ms']:,.1f} ms" + ("" if shapes is None else " at the operations a second of --tflops")
    typer.echo(f"  step       {step}, bubble {abs(report['bubble_percent']):.2f} %")
    typer.echo(f"  traffic    {report['traffic_ratio']:.2f} x one visit to each layer in each direction")
    typer.echo(f"  limited by {report['limit']}")
    if "next_best" in report:
        other = report["next_best"]
        slower = 100 * (other["step_ms"] / report["step_ms"] - 1)
        typer.echo(
            f"  next best  {other['summary']}: {slower:+.2f} % time, {other['traffic_ratio']:.2f} x traffic",
        )
