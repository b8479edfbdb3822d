"""The `roundpipe plan` command: which stages, why, and whether it fits. The work is imported when it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from roundpipe.command_options import After
from roundpipe.planning.options import STAGES_LEGEND, LinkOptions, require

if TYPE_CHECKING:
    from roundpipe.memory.budget import HostPrediction
    from roundpipe.planning.fit import Fit
    from roundpipe.planning.fit_report import FitReport
    from roundpipe.planning.schedules import Request
    from roundpipe.planning.shapes import ModelShapes

_TOKENS = 8192
_MOST_TOKENS = 1 << 24
_TFLOPS = 100.0
# Of the search, in the planner's microbatch visits, while only memory is asked for.
_QUICK_EFFORT = 2_000_000


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LinkOptions):
    """Options of `roundpipe plan`."""

    schema: ClassVar[str] = "roundpipe.plan/1"
    modes: ClassVar[tuple[str, ...]] = ("async", "sync", "inference")
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder (or config.json) of a transformers model, of which only the shapes are read; a cost file; "
            "or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora.",
        ),
    ]
    mode: Annotated[str, typer.Option(help="async, sync or inference.")] = "async"
    host_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the host, such as 512GB (default: not compared).", show_default=False),
        After("memory"),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(help=f"For a model: tokens of a microbatch, in one row (default: {_TOKENS})."),
        After("host_memory"),
    ] = None
    train: Annotated[
        str | None,
        typer.Option(help="For a model: full (all weights, the default) or lora (adapters of rank 16)."),
        After("tokens"),
    ] = None
    tflops: Annotated[
        float | None,
        typer.Option(help=f"For a model: 1e12 operations per second that a device reaches (default: {_TFLOPS:g})."),
        After("train"),
    ] = None
    save: Annotated[
        Path | None, typer.Option(help="Write the stages to this file, for ModelExecutePlan.load."), After("as_json")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens is None or 1 <= self.tokens <= _MOST_TOKENS, "tokens", self.tokens, f"1 to {_MOST_TOKENS}")
        require(self.train in (None, "full", "lora"), "train", self.train, "full or lora")
        if self.mode == "sync":
            self.refuse(["steps_shown"], "--mode async or inference")
        if self.mode == "inference":
            self.refuse(["host_memory", "keep", "gradient_groups", "update_rate"], "--mode async or sync")
        require(self.tflops is None or 1e-6 <= self.tflops <= 1e9, "tflops", self.tflops, "1e-06 to 1e+09")

    @property
    def outputs(self) -> dict[str, Path | None]:
        return {**super().outputs, "save": self.save}


def plan(options: PlanOptions) -> None:
    """Choose stages, replicas and order for a model and a machine, say why, and whether the model fits.

    The predicted memory is that of bf16 weights, fp32 masters and Adam's moments on the host, and fused attention.
    """
    from roundpipe import _core
    from roundpipe.call.execute_plan import ModelExecutePlan
    from roundpipe.planning import fit as fitting
    from roundpipe.planning.costs import load
    from roundpipe.planning.model_folder import is_model
    from roundpipe.planning.schedules import choose_with_more_groups, describe_choice, timeline_of

    inference = options.mode == "inference"
    shapes = None
    if is_model(options.model):
        shapes = _shapes(options)
        costs = fitting.costs_of_shapes(shapes, _TFLOPS if options.tflops is None else options.tflops)
        layers = fitting.layers_of_shapes(shapes)
    else:
        options.refuse(["tokens", "train", "tflops"], "a model's folder, because costs are for their own batch")
        costs = load(options.model)
        layers = fitting.layers_of_costs(costs)
    request = options.request(costs)
    plan_mode = _core.PlanMode.INFERENCE if inference else _core.PlanMode.FUSED
    memory = options.memory_bytes()
    found = fitting.fit(request, layers, request.memory_of_each() if memory is None else memory, plan_mode)
    best = found.choices[0]
    report = options.document(request) | describe_choice(best, found.choices[1:])
    more = None if inference else choose_with_more_groups(found.request, best)
    if more is not None:
        with_groups, choices = more
        less = 100 * (1 - choices[0].step_ms / best.step_ms)
        report["more_groups"] = {
            "gradient_groups": with_groups.gradient_groups,
            "less_time_percent": less,
            **describe_choice(choices[0], []),
        }
    host_memory = None if options.host_memory is None else _core.parse_bytes(options.host_memory)
    memory_report = None if inference else _memory(found, shapes, host_memory)
    if options.as_json:
        document = report if memory_report is None else report | {"memory": memory_report.document()}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print_choice(f"{request.costs.name}: {options.setting(request)}", report, shapes)
        for line in [] if memory_report is None else memory_report.lines():
            typer.echo(line)
    if options.save is not None:
        stages = ModelExecutePlan()
        stages.fwd_plan = [range(stage.first, stage.last) for stage in best.stages.forward]
        stages.bwd_plan = [range(stage.first, stage.last) for stage in best.stages.backward]
        stages.save(options.save)
    if options.draws:
        timeline, plans = timeline_of(best, found.request)
        from roundpipe.planning.pictures import spans_of, steady_window

        spans = spans_of(timeline, plans, steady_window(timeline, plans, options.steps_shown))
        options.write_pictures([(best.cut, spans)], f"{request.costs.name}, {options.setting(request)}")


def _shapes(options: PlanOptions) -> ModelShapes:
    from roundpipe.planning.model_folder import measure_folder

    require(options.mode != "inference", "mode", options.mode, "async or sync for a model's folder")
    tokens = _TOKENS if options.tokens is None else options.tokens
    return measure_folder(options.model, tokens, "lora" if options.train == "lora" else "full")


def _memory(found: Fit, shapes: ModelShapes | None, host_memory: int | None) -> FitReport:
    from roundpipe.planning.fit_report import FitReport, host_of_costs

    def with_sums(host: HostPrediction) -> HostPrediction:
        return replace(host, partial_sums=host.partial_sums + found.partial_sums)

    if shapes is None:
        return FitReport(
            found,
            with_sums(host_of_costs(found.request.costs, found.values, moments_bytes=8)),
            with_sums(host_of_costs(found.request.costs, found.values, moments_bytes=2)),
            host_memory,
            unknown="embeddings, and what a layer holds for a moment only; costs do not say (a model's folder does)",
        )
    meta = shapes.model

    def predict(tokens: int) -> Fit:
        from roundpipe.planning import fit as fitting
        from roundpipe.planning.shapes import measure

        longer = measure(meta, tokens, shapes.name)
        machine = found.request.costs
        costs = replace(fitting.costs_of_shapes(longer, _TFLOPS), devices=machine.devices, rates=machine.rates)
        request: Request = replace(found.request, costs=costs, effort=_QUICK_EFFORT)
        return fitting.fit(request, fitting.layers_of_shapes(longer), found.memory_of_each)

    def adapters() -> HostPrediction:
        from roundpipe.planning.model_folder import LORA_RANK
        from roundpipe.planning.shapes import make_model, measure

        config: Any = meta.config
        return measure(make_model(config, LORA_RANK), 1, shapes.name).host(values=found.values)

    return FitReport(
        found,
        with_sums(shapes.host("float32", found.values)),
        with_sums(shapes.host("8bit", found.values)),
        host_memory,
        predict=predict,
        adapters=adapters if shapes.trained == shapes.parameters else None,
    )


def _print_choice(title: str, report: dict[str, Any], shapes: ModelShapes | None) -> None:
    typer.echo(title)
    if shapes is not None:
        typer.echo(
            f"  model      {shapes.parameters / 1e9:.2f} G parameters, {shapes.trained / 1e9:.2f} G train, "
            f"{shapes.tokens:,} tokens a microbatch"
        )
    typer.echo(f"  stages     {report['summary']}")
    typer.echo(f"  notation   {STAGES_LEGEND}")
    step = f"{report['step_ms']:,.1f} ms" + ("" if shapes is None else " at the operations a second of --tflops")
    typer.echo(f"  step       {step}, bubble {report['bubble_percent']:.2f} %")
    typer.echo(f"  traffic    {report['traffic_ratio']:.2f} x one visit to each layer in each direction")
    typer.echo(f"  limited by {report['limit']}")
    if "next_best" in report:
        other = report["next_best"]
        slower = 100 * (other["step_ms"] / report["step_ms"] - 1) if report["step_ms"] else 0.0
        time = f"{round(slower, 2) + 0.0:+.2f} % time"  # adding 0 makes 0 of -0
        typer.echo(f"  next best  {other['summary']}: {time}, {other['traffic_ratio']:.2f} x traffic")
    if "more_groups" in report:
        more = report["more_groups"]
        typer.echo(
            f"  groups     with gradient_groups={more['gradient_groups']}: {more['less_time_percent']:.1f} % less time"
        )
