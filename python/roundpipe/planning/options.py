"""What the options of the planning commands share. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import typer

from roundpipe.command_options import After
from roundpipe.performance.notation import STAGES_LEGEND as STAGES_LEGEND

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from roundpipe.memory.budget import UpdateRule
    from roundpipe.performance.pictures import Span
    from roundpipe.planning.costs import CostSet
    from roundpipe.planning.machine import Machine
    from roundpipe.planning.schedules import Impossible, Request

CostsArgument = Annotated[
    str,
    typer.Argument(
        metavar="COSTS",
        help="A cost file, or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora.",
    ),
]

# Of the search, in microbatch visits. A fixed rate, so that a time limit gives the same plan on every machine.
EFFORT_PER_SECOND = 300_000_000
# Those of training, and those that have moments of one byte.
Optimizer = Literal["adam", "adamw", "sgd", "lion", "adafactor", "rmsprop"]
OPTIMIZERS = get_args(Optimizer)
WITH_8BIT = ("adam", "adamw")
# Of matrix products, by the dtype of weights; "fp16-accumulate" are products of fp16 whose sums are fp16, too.
_MOST_SECONDS = 3600
_LONGEST_SHOWN = 100
_WIDEST_TABLE = 250
_MOST_STEPS_SHOWN = 64


def require(ok: bool, option: str, value: object, expected: str) -> None:
    """Raises a ValueError that names the option, unless `ok`."""
    if not ok:
        shown = str(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
        raise ValueError(f"[options] --{option} is {shown}, expected {expected}")


# GB/s of a link, a network, or the host's optimizer.
RATES_EXPECTED = "1e-06 to 1e+09"


def is_rate(gb_per_s: float) -> bool:
    return 1e-6 <= gb_per_s <= 1e9


def schedules_in(text: str, known: Collection[str], every: Iterable[str]) -> list[str]:
    """The names in `--schedule`, which commas separate and which are `known`; "all" is `every`."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return list(every)
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"[schedule] there is no schedule '{name}', expected one of {', '.join(known)} or all")
        require(name not in names[:place], "schedule", text, f"{name} only once")
    return names


def require_files(paths: dict[str, Path | None]) -> None:
    """Raises a ValueError, before any work is done, if an output cannot be written. `paths`: by option."""
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        require(bool(path.name), option, f"'{path}'", "the path of a file")
        # These also answer for a name that no file can have.
        require(not os.path.isdir(path), option, path, "a file, not a folder")
        require(os.path.isdir(path.parent), option, path, "a file in a folder that exists")
        require(os.access(path.parent, os.W_OK | os.X_OK), option, path, "a file in a folder that can be written")
        other = seen.setdefault(path.absolute(), option)
        require(other == option, option, path, f"another file than --{other}")


def print_table(
    title: str, columns: list[str], rows: Sequence[list[str] | Impossible], of_rows: str = "schedule"
) -> None:
    """Prints one line for each schedule, or other things; that of an impossible one says why."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
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


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Options of every planning command."""

    schema: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ("async", "sync")
    devices: Annotated[
        int | None,
        typer.Option(help="Number of devices (default: those of the cost file, else 8).", show_default=False),
    ] = None
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per step.")] = 16
    mode: Annotated[str, typer.Option(help="async (steps overlap, staleness one) or sync.")] = "async"
    max_traffic: Annotated[
        float,
        typer.Option(help="Limit of weight uploads, as a factor of one visit in each direction; 0 = no limit."),
    ] = 0.0
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each device, such as 24GB (default: the cost file's).", show_default=False),
    ] = None
    keep: Annotated[
        int,
        typer.Option(
            help="Up to this many last layers keep their activations, without recompute; 1 = the head; 0 = as training "
            "does: as many as fit on one device, and on up to four that share gradient groups; else the head."
        ),
    ] = 0
    replicas: Annotated[bool, typer.Option(help="Let devices share a stage and divide its microbatches.")] = True
    gradient_groups: Annotated[
        int,
        typer.Option(
            help="Groups of microbatches whose gradients a step sums by themselves: devices share a backward stage by "
            "whole groups. 0 = they divide its microbatches anywhere."
        ),
    ] = 1
    effort: Annotated[
        int | None, typer.Option(help="Effort of the search, in microbatch visits (default: about half a second).")
    ] = None
    search_seconds: Annotated[
        float | None,
        typer.Option(
            help=f"The effort as seconds of an idle core, each {EFFORT_PER_SECOND:,} visits on any machine: the same "
            "seconds always give the same plan.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    steps_shown: Annotated[int, typer.Option(help="Steps that a picture shows, at the printed pace.")] = 2
    png: Annotated[Path | None, typer.Option(help="Write the timelines to this PNG.")] = None
    html: Annotated[Path | None, typer.Option(help="Write the timelines to this HTML page.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write the first schedule's timeline for chrome://tracing and Perfetto.")
    ] = None

    def __post_init__(self) -> None:
        *others, last = self.modes
        require(self.mode in self.modes, "mode", self.mode, f"{', '.join(others)} or {last}")
        require(self.devices is None or 1 <= self.devices <= 1024, "devices", self.devices, "1 to 1024")
        count_ok = self.microbatches is None or 1 <= self.microbatches <= 4096
        require(count_ok, "microbatches", self.microbatches, "1 to 4096")
        traffic_ok = self.max_traffic >= 0 and math.isfinite(self.max_traffic)
        require(traffic_ok, "max-traffic", self.max_traffic, "0 (no limit), or a finite number above it")
        groups_ok = 0 <= self.gradient_groups <= 4096
        require(groups_ok, "gradient-groups", self.gradient_groups, "0 (anywhere) to 4096")
        if not self.replicas:
            self.refuse(["gradient_groups"], "replicas")
        require(0 <= self.keep <= 10_000, "keep", self.keep, "0 to 10000")
        require(self.effort is None or 0 <= self.effort <= 10**12, "effort", self.effort, "0 to 1000000000000")
        seconds_ok = self.search_seconds is None or 0 <= self.search_seconds <= _MOST_SECONDS
        require(seconds_ok, "search-seconds", self.search_seconds, f"0 to {_MOST_SECONDS}")
        if self.effort is not None:
            require(self.search_seconds is None, "search-seconds", self.search_seconds, "it without --effort")
        require(
            1 <= self.steps_shown <= _MOST_STEPS_SHOWN, "steps-shown", self.steps_shown, f"1 to {_MOST_STEPS_SHOWN}"
        )
        require_files(self.outputs)
        if not self.draws:
            self.refuse(["steps_shown"], "a picture: --png, --html or --trace")

    @property
    def draws(self) -> bool:
        """Whether a picture was asked for."""
        return any(path is not None for path in (self.png, self.html, self.trace))

    def refuse(self, fields: Iterable[str], needs: str) -> None:
        """Raises a ValueError for the first of these options that was given: they have no effect without `needs`."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for field in fields:
            value = getattr(self, field)
            if value != defaults[field]:
                option = "no-" + field if value is False else field.replace("_", "-")
                raise ValueError(
                    f"[options] --{option} has no effect here, expected it only with {needs}; leave it out"
                )

    def refuse_planner_options(self, schedules: Collection[str]) -> None:
        """Raises a ValueError if an option of our planner was given, but its schedule is not among these."""
        if "roundpipe" not in schedules:
            planner = ["max_traffic", "memory", "keep", "replicas", "gradient_groups", "effort", "search_seconds"]
            self.refuse(planner, "roundpipe in --schedule")

    @property
    def outputs(self) -> dict[str, Path | None]:
        """The files to write, by option."""
        return {"png": self.png, "html": self.html, "trace": self.trace}

    def memory_bytes(self) -> int | None:
        """Memory of each device; None: that of the costs."""
        from roundpipe import _core

        return None if self.memory is None else _core.parse_bytes(self.memory)

    def request(self, costs: CostSet) -> Request:
        """The schedule to plan."""
        from roundpipe.planning.schedules import Request

        cluster = costs.cluster(self.devices, self.memory_bytes())
        return Request(
            costs=costs,
            cluster=cluster,
            # As in training.
            microbatches=len(cluster) + 1 if self.microbatches is None else self.microbatches,
            mode="sync" if self.mode == "sync" else "async",
            max_traffic=self.max_traffic,
            keep_layers=self.keep,
            replicas=self.replicas,
            gradient_groups=self.gradient_groups,
            effort=self.effort if self.search_seconds is None else round(EFFORT_PER_SECOND * self.search_seconds),
        )

    def document(self, request: Request) -> dict[str, Any]:
        """The fields with which each command's JSON begins; `inputs` holds every option, as it was given."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "as_json"}
        return {
            "schema": self.schema,
            "inputs": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
            "costs": request.costs.name,
            "devices": request.devices,
            "microbatches": request.microbatches,
            "mode": self.mode,
        }

    def setting(self, request: Request) -> str:
        """The machine and the batch, for titles."""
        return f"{request.devices} devices, {request.microbatches} microbatches, {self.mode}"

    def write_pictures(self, rows: list[tuple[str, list[Span]]], title: str) -> None:
        """Writes the pictures that were asked for, and says so on the error stream."""
        from roundpipe.performance import pictures

        if self.png is not None:
            pictures.write_png(self.png, rows)
        if self.html is not None:
            pictures.write_html(self.html, title, rows)
        if self.trace is not None:
            pictures.write_trace(self.trace, rows[0][1])
        for path in (self.png, self.html, self.trace):
            if path is not None:
                typer.echo(f"wrote {path}", err=True)


@dataclass(frozen=True, kw_only=True)
class LinkOptions(PlanningOptions):
    """Options of the commands that can count every byte."""

    machine: Annotated[
        Path | None,
        typer.Option(
            help="A machine file, as `roundpipe machine` writes it, in place of the cost file's; with --links."
        ),
        After("devices"),
    ] = None
    links: Annotated[
        bool,
        typer.Option("--links", help="Simulate every byte over the cost file's links, not a fixed hop latency."),
        After("replicas"),
    ] = False
    update_rate: Annotated[
        float,
        typer.Option(
            help="With --links: GB of weights that the host's optimizer updates per second; 0 = as many as the host's "
            "memory lets it."
        ),
        After("links"),
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rate_ok = self.update_rate == 0 or is_rate(self.update_rate)
        require(rate_ok, "update-rate", self.update_rate, f"0 (no limit), or {RATES_EXPECTED}")
        if not self.counts_bytes:
            self.refuse(["machine", "update_rate"], "--links")

    @property
    def counts_bytes(self) -> bool:
        """Whether every byte is simulated."""
        return self.links

    @property
    def rule(self) -> UpdateRule:
        """The optimizer, which takes and moves memory of the host."""
        from roundpipe.memory.budget import UpdateRule

        return UpdateRule("adamw")

    def machine_file(self) -> Machine | None:
        """What `--machine` says."""
        from roundpipe.planning import machine as machines

        return None if self.machine is None else machines.load(self.machine)

    def request(self, costs: CostSet) -> Request:
        machine = self.machine_file()
        if machine is not None:
            costs = machine.costs(costs)
        request = super().request(costs)
        if self.counts_bytes:
            request.links = costs.cluster(self.devices, self.memory_bytes(), with_links=True)
            own_rate = 0.0 if machine is None else machine.update_gb_per_s
            request.update_gb_per_s = self.update_rate or own_rate
            request.update_traffic = self.rule.traffic()
        return request
