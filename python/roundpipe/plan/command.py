"""The `roundpipe plan` command: which stages, why, how fast, and whether it fits. The work is imported when it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from roundpipe.plan.options import PlanOptions
from roundpipe.plan.performance import STAGES_LEGEND
from roundpipe.plan.performance.sizes import sized, sized_of, unit_of

if TYPE_CHECKING:
    from roundpipe.plan.compare import Impossible
    from roundpipe.plan.nodes import NodesPrediction
    from roundpipe.plan.performance.pictures import Span
    from roundpipe.plan.schedules import Prediction
    from roundpipe.plan.shapes import ModelShapes
    from roundpipe.plan.within_memory import Planned


def plan(options: PlanOptions) -> None:
    """Choose stages, replicas and order for a model and a machine: say why, how fast, and whether the model fits.

    roundpipe plan qwen3-32b --devices 4 --memory 24GB
    roundpipe plan llama3.1-8b --mode sync --compare all
    roundpipe plan llama3.1-8b --nodes 1,2,4 --network 10Gb/s
    roundpipe plan --measure machine.toml --disk /nvme/scratch

    The predicted memory is that of bf16 weights, fp32 masters and the optimizer's moments on the host, and fused
    attention. --measure takes some seconds for each device, on which nothing else should run meanwhile; of a virtual
    device, it measures what the host's memory and cores give, or the caps in ROUNDPIPE_DEVICES.
    """
    if options.measure is not None:
        _measure(options.measure, options.model, options.disk)
    if options.model is not None:
        _Report(options).show()


def _measure(path: Path, model: str | None, disk: str | None) -> None:
    import dataclasses

    import roundpipe
    from roundpipe.plan import machine
    from roundpipe.plan.costs import load
    from roundpipe.plan.measure import measure
    from roundpipe.plan.model_folder import is_model

    if model is not None and not is_model(model):
        load(model)  # a mistake is named before anything is measured

    def say(what: str) -> None:
        typer.echo(f"measuring {what}", err=True)

    found = measure(roundpipe.devices(None), say=say)
    if disk is not None:
        say(f"the disk of {disk}, which is written {2 * _DISK_GB:g} GB")
        found = dataclasses.replace(found, disk=machine.measure_disk(disk, _DISK_GB))
    found.save(path)
    typer.echo(f"wrote {path}", err=True)


# Of a disk that is measured: enough to pass its own cache of writes.
_DISK_GB = 16.0


class _Report:
    """A plan with all that was asked for beside it."""

    def __init__(self, options: PlanOptions) -> None:
        from roundpipe.plan.compare import each_possible
        from roundpipe.plan.nodes import predict_nodes
        from roundpipe.plan.schedules import choose_with_more_groups, predict_choice
        from roundpipe.plan.within_memory import plan_within_memory

        self._options = options
        self._network = None if options.nodes is None else options.network_of_nodes()
        self._planned = plan_within_memory(options)
        self._request, self._choices = self._planned.fit.request, self._planned.fit.choices
        training = options.mode != "inference"
        self._more = choose_with_more_groups(self._request, self._choices[0]) if training else None
        self._memory = _MemoryReport(self._planned) if training else None
        self._disk = self._planned.disk if training else None
        self._schedules: list[Prediction | Impossible] = []
        self._nodes: list[NodesPrediction] = []
        if self._network is not None:
            counts = options.node_counts()
            self._nodes = predict_nodes(
                counts,
                self._request,
                self._choices[0],
                self._network,
                clip=options.clip,
                at_once=options.gradients_at_once,
            )
        elif options.compare is not None or options.picture is not None:
            self._schedules.append(predict_choice("roundpipe", self._request, self._choices))
        if options.compare is not None:
            if self._more is not None:
                groups, choices = self._more
                name = f"roundpipe, {groups.gradient_groups} gradient groups"
                self._schedules.append(predict_choice(name, groups, choices))
            self._schedules += each_possible(options.compared(), self._planned.asked)

    def show(self) -> None:
        """Prints, and writes the files that were asked for."""
        if self._options.as_json:
            typer.echo(json.dumps(self._document(), indent=2))
        else:
            self._print()
        if self._options.save is not None:
            self._save_stages(self._options.save)
        if self._options.picture is not None:
            from roundpipe.plan.performance import pictures

            pictures.write(self._options.picture, self._title, self._rows())
            typer.echo(f"wrote {self._options.picture}", err=True)

    @property
    def _title(self) -> str:
        return f"{self._request.costs.name}: {self._options.setting(self._request)}"

    def _document(self) -> dict[str, Any]:
        options = self._options
        document = options.document(self._request) | self._choice()
        if self._memory is not None:
            document["memory"] = self._memory.document()
        if self._disk is not None:
            document["disk"] = self._disk.document()
        if options.compare is not None:
            document["schedules"] = [result.document() for result in self._schedules]
        if self._network is not None:
            document["network_gb_per_s"] = self._network.gb_per_s
            document["network_latency_ms"] = self._network.latency_ms
            document["nodes"] = [prediction.document() for prediction in self._nodes]
        return document

    def _choice(self) -> dict[str, Any]:
        from roundpipe.plan.schedules import describe_choice

        best, *others = self._choices
        shapes = self._planned.shapes
        report: dict[str, Any] = {} if shapes is None else {"arithmetic": shapes.arithmetic}
        report |= describe_choice(best, others) | {"again_ms": self._planned.fit.again_ms}
        if self._more is not None:
            with_groups, choices = self._more
            report["more_groups"] = {
                "gradient_groups": with_groups.gradient_groups,
                "less_time_percent": 100 * (1 - choices[0].step_ms / best.step_ms),
                **describe_choice(choices[0], []),
            }
        return report

    def _print(self) -> None:
        from roundpipe.plan.compare import print_schedules
        from roundpipe.plan.nodes import print_nodes

        _print_choice(self._title, self._choice(), self._planned.shapes)
        for line in [] if self._memory is None else self._memory.lines():
            typer.echo(line)
        if self._disk is not None:
            typer.echo(self._disk.line())
        if self._options.compare is not None:
            print_schedules(self._schedules)
        if self._network is not None:
            print_nodes(self._nodes, self._network, self._options.clip)

    def _rows(self) -> list[tuple[str, list[Span]]]:
        from roundpipe.plan.pictures import spans_of
        from roundpipe.plan.schedules import Prediction

        if self._nodes:
            return [(node.title(), spans_of(node.links.timeline, node.plans, node.links)) for node in self._nodes]
        return [
            (result.title(), spans_of(result.timeline, result.plans, result.links))
            for result in self._schedules
            if isinstance(result, Prediction)
        ]

    def _save_stages(self, path: Path) -> None:
        from roundpipe.model.call.execute_plan import ModelExecutePlan

        best = self._choices[0].stages
        stages = ModelExecutePlan()
        stages.fwd_plan = [range(stage.first, stage.last) for stage in best.forward]
        stages.bwd_plan = [range(stage.first, stage.last) for stage in best.backward]
        stages.save(path)


def _print_choice(title: str, report: dict[str, Any], shapes: ModelShapes | None) -> None:
    typer.echo(title)
    if shapes is not None:
        typer.echo(
            f"  model      {_count(shapes.parameters)} parameters, {_count(shapes.trained)} train, "
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


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


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
            short.append(f"the host needs {sized_of(host.total, room)}")
        if not fit.fits:
            short.append(f"a device needs {sized_of(fit.device.needed, fit.memory)}")
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
        on_device = sized_of(fit.device.needed, fit.memory) if fit.memory else sized(fit.device.needed)
        on_host = sized(host.total) if room is None else sized_of(host.total, room)
        line = f"fits (predicted): {on_device} on a device, {on_host} on the host"
        return f"{line}; not compared: {asked[0]}" if asked else line


def _names(rows: dict[str, int]) -> dict[str, int]:
    return {name.replace(" ", "_"): size for name, size in rows.items()}


def _table(rows: list[tuple[str, dict[str, int], int, int | None]]) -> list[str]:
    lines = []
    for title, sizes, total, there in rows:
        names = [*sizes, "together", "of"]
        unit, unit_name = unit_of(total)
        cells = ["-" if size is None else f"{size / unit:.2f}" for size in (*sizes.values(), total, there)]
        widths = [max(len(name), len(cell)) for name, cell in zip(names, cells, strict=True)]
        lines.append(
            f"{'predicted, ' + unit_name:16}" + "".join(f"  {n:>{w}}" for n, w in zip(names, widths, strict=True))
        )
        lines.append(f"  {title:14}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    return lines
