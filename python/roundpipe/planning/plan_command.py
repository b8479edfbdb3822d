"""The `roundpipe plan` command: which stages, why, and whether it fits. The work is imported when it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.planning.options import STAGES_LEGEND
from roundpipe.planning.plan_options import PlanOptions

if TYPE_CHECKING:
    from roundpipe.planning.plan_within_memory import Planned
    from roundpipe.planning.shapes import ModelShapes


def plan(options: PlanOptions) -> None:
    """Choose stages, replicas and order for a model and a machine, say why, and whether the model fits.

    The predicted memory is that of bf16 weights, fp32 masters and the optimizer's moments on the host, and fused
    attention.
    """
    from roundpipe.call.execute_plan import ModelExecutePlan
    from roundpipe.planning.plan_within_memory import plan_within_memory
    from roundpipe.planning.schedules import choose_with_more_groups, describe_choice, timeline_of

    inference = options.mode == "inference"
    planned = plan_within_memory(options)
    found, request, shapes = planned.fit, planned.fit.request, planned.shapes
    best = found.choices[0]
    arithmetic = {} if shapes is None else {"arithmetic": shapes.arithmetic}
    report = (
        options.document(request) | arithmetic | describe_choice(best, found.choices[1:]) | {"again_ms": found.again_ms}
    )
    more = None if inference else choose_with_more_groups(request, best)
    if more is not None:
        with_groups, choices = more
        less = 100 * (1 - choices[0].step_ms / best.step_ms)
        report["more_groups"] = {
            "gradient_groups": with_groups.gradient_groups,
            "less_time_percent": less,
            **describe_choice(choices[0], []),
        }
    memory_report = None if inference else _MemoryReport(planned)
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


def _print_choice(title: str, report: dict[str, Any], shapes: ModelShapes | None) -> None:
    typer.echo(title)
    if shapes is not None:
        typer.echo(
            f"  model      {shapes.parameters / 1e9:.2f} G parameters, {shapes.trained / 1e9:.2f} G train, "
            f"{shapes.tokens:,} tokens a microbatch"
        )
        typer.echo(f"  arithmetic {shapes.arithmetic}")
    typer.echo(f"  stages     {report['summary']}")
    typer.echo(f"  notation   {STAGES_LEGEND}")
    step = f"{report['step_ms']:,.1f} ms" + ("" if shapes is None else " (predicted)")
    typer.echo(f"  step       {step}, bubble {report['bubble_percent']:.2f} %")
    if report["again_ms"]:
        typer.echo(
            f"  more       {report['again_ms']:,.1f} ms for forwards that layer by layer recompute runs once more"
        )
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


@dataclass(frozen=True)
class _MemoryReport:
    """Predicted bytes beside the available memory."""

    planned: Planned

    def document(self) -> dict[str, Any]:
        """The report for JSON; sizes in bytes."""
        fit, host = self.planned.fit, self.planned.host
        return {
            "predicted_host_bytes": {**_names(host.rows()), "together": host.total},
            "predicted_device_bytes": {**fit.device.rows(), "together": fit.device.total},
            "host_memory": self.planned.options.host_bytes(),
            "device_memory": fit.memory or None,
            "recompute_grain": fit.grain,
            "fits": self.planned.fits,
            "verdict": self.verdict(),
        }

    def lines(self) -> list[str]:
        """The lines of a table, the unknown parts, and the verdict."""
        fit, host = self.planned.fit, self.planned.host
        # Most plans have no partial sums.
        sizes = {name: size for name, size in host.rows().items() if size or not name.startswith("partial")}
        lines = _table([("host", sizes, host.total, self.planned.options.host_bytes())])
        lines += _table([("fullest device", fit.device.rows(), fit.device.total, fit.memory or None)])
        if self.planned.unknown:
            lines.append(f"not known: {self.planned.unknown}")
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """One line that begins with "fits" or "does not fit"."""
        fit, host, room = self.planned.fit, self.planned.host, self.planned.options.host_bytes()
        short = []
        if room is not None and not self.planned.host_fits:
            short.append(f"the host needs {_gb(host.total)} of {_gb(room)} GB")
        if not fit.fits:
            short.append(f"a device needs {_gb(fit.device.needed)} of {_gb(fit.memory)} GB")
        if short:
            found = self.planned.change()
            change = "give it more memory, or take a smaller model" if found is None else f"it would with {found}"
            return f"does not fit (predicted): {'; '.join(short)}; {change}"
        asked = []
        if not fit.memory:
            asked.append("--memory")
        if room is None:
            asked.append("--host-memory")
        if len(asked) == 2:
            return "not compared: give --memory and --host-memory"
        of_host = "" if room is None else f" of {_gb(room)}"
        of_device = f" of {_gb(fit.memory)}" if fit.memory else ""
        line = f"fits (predicted): {_gb(fit.device.needed)}{of_device} GB on a device, "
        line += f"{_gb(host.total)}{of_host} GB on the host"
        return f"{line}; not compared: {asked[0]}" if asked else line


def _names(rows: dict[str, int]) -> dict[str, int]:
    return {name.replace(" ", "_"): size for name, size in rows.items()}


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _table(rows: list[tuple[str, dict[str, int], int, int | None]]) -> list[str]:
    lines = []
    for title, sizes, total, there in rows:
        names = [*sizes, "together", "of"]
        cells = [*map(_gb, sizes.values()), _gb(total), "-" if there is None else _gb(there)]
        widths = [max(len(name), len(cell)) for name, cell in zip(names, cells, strict=True)]
        lines.append(f"{'predicted, GB':16}" + "".join(f"  {n:>{w}}" for n, w in zip(names, widths, strict=True)))
        lines.append(f"  {title:14}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    return lines
