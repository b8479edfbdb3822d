"""The `roundpipe simulate` command. The work is imported when it runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from roundpipe.command_options import After
from roundpipe.planning.options import (
    RATES_EXPECTED,
    STAGES_LEGEND,
    CostsArgument,
    LinkOptions,
    is_rate,
    print_table,
    require,
    schedules_in,
)

if TYPE_CHECKING:
    from roundpipe import _core
    from roundpipe.performance.pictures import Span
    from roundpipe.planning.schedules import Impossible, Prediction, Request
    from roundpipe.simulation.nodes import Network, NodesPrediction

# Of a collective among nodes, besides its bytes, if nothing else is said.
_LATENCY_MS = 1.0
_MOST_LATENCY_MS = 1e6
_MOST_NODES = 4096
_MOST_COUNTS = 64
# GB/s of one unit of --network, by its letters.
_PREFIXES = {"": 1e-9, "k": 1e-6, "K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_UNITS = {"B": 1.0, "b": 1 / 8, "bit": 1 / 8}


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
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Predict the step of our schedule on so many equal nodes, or on each of several numbers with commas: "
            "1,2,4. Counts every byte, as --links does.",
            show_default=False,
        ),
        After("update_rate"),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(
            help="With --nodes: a node's bandwidth in each direction, such as 10Gb/s or 1.25GB/s (default: the machine "
            "file's).",
            show_default=False,
        ),
        After("nodes"),
    ] = None
    network_latency: Annotated[
        float | None,
        typer.Option(
            help="With --nodes: milliseconds of each collective, besides its bytes (default: the machine file's, else "
            f"{_LATENCY_MS:g}).",
            show_default=False,
        ),
        After("network"),
    ] = None
    clip: Annotated[
        bool,
        typer.Option(
            "--clip", help="With --nodes: updates wait for the step's last gradient, as clipping and loss scales need."
        ),
        After("network_latency"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is None:
            self.refuse(["network", "network_latency", "clip"], "--nodes")
        elif self.schedule != "all":
            require(self.schedule == "roundpipe", "schedule", self.schedule, "roundpipe, or all of it, with --nodes")
        self.node_counts()
        self.network_gb_per_s()
        latency = self.network_latency
        latency_ok = latency is None or 0 <= latency <= _MOST_LATENCY_MS
        require(latency_ok, "network-latency", latency, f"0 to {_MOST_LATENCY_MS:g} milliseconds")
        if self.mode == "sync" and self.nodes is None:
            self.refuse(["steps_shown"], "--mode async")

    @property
    def counts_bytes(self) -> bool:
        return self.links or self.nodes is not None

    def node_counts(self) -> list[int]:
        """The numbers in `--nodes`; empty without."""
        if self.nodes is None:
            return []
        counts = []
        for text in self.nodes.split(","):
            known = re.fullmatch(r"[0-9]{1,4}", text.strip()) is not None
            counts.append(int(text) if known else 0)
            require(1 <= counts[-1] <= _MOST_NODES, "nodes", self.nodes, f"numbers from 1 to {_MOST_NODES} with commas")
            require(counts[-1] not in counts[:-1], "nodes", self.nodes, f"{counts[-1]} only once")
        require(len(counts) <= _MOST_COUNTS, "nodes", self.nodes, f"at most {_MOST_COUNTS} numbers")
        return counts

    def network_gb_per_s(self) -> float | None:
        """The bandwidth in `--network`; None without."""
        if self.network is None:
            return None
        parts = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([kKMGT]?)(bit|b|B)/s", self.network.strip())
        rate = 0.0 if parts is None else float(parts[1]) * _PREFIXES[parts[2]] * _UNITS[parts[3]]
        expected = f"bits or bytes per second, such as 10Gb/s or 1.25GB/s, of {RATES_EXPECTED} GB/s"
        require(is_rate(rate), "network", self.network, expected)
        return rate

    def network_of_nodes(self) -> Network:
        """What connects the nodes: by the options, else by the machine file."""
        from roundpipe.simulation.nodes import Network

        machine = self.machine_file()
        bandwidth, latency = self.network_gb_per_s(), self.network_latency
        if machine is not None:
            bandwidth = machine.network_gb_per_s if bandwidth is None else bandwidth
            latency = machine.network_latency_ms if latency is None else latency
        if bandwidth is None:
            require(
                self.node_counts() == [1], "network", "not given", "it with --nodes, or network_gb_per_s in --machine"
            )
            bandwidth = 0.0
        return Network(bandwidth, _LATENCY_MS if latency is None else latency)


def simulate(options: SimulateOptions) -> None:
    """Predict what a step takes, with our planner's schedule and with those of other systems."""
    from roundpipe.planning.costs import load
    from roundpipe.planning.schedules import NAMES, Impossible, each_possible, predict

    request = options.request(load(options.costs))
    request.published_rule = options.published_rule
    every = [name for name in NAMES if name != "one-device"]
    if options.counts_bytes:
        every = ["roundpipe", "published"]
    names = schedules_in(options.schedule, NAMES, every)
    options.refuse_planner_options(names)
    if options.counts_bytes or "published" not in names:
        options.refuse(["published_rule"], "published in --schedule and without --links or --nodes")
    if options.nodes is not None:
        _simulate_nodes(options, request)
        return
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
        rows = [
            (_title(prediction), _spans(prediction.timeline, prediction.plans, options.steps_shown, prediction.links))
            for prediction in predictions
        ]
        options.write_pictures(rows, f"{request.costs.name}, {options.setting(request)}")


def _simulate_nodes(options: SimulateOptions, request: Request) -> None:
    from roundpipe.planning.schedules import choose, predict_choice
    from roundpipe.simulation.nodes import predict_nodes

    network = options.network_of_nodes()
    choices = choose(request)
    predictions = predict_nodes(options.node_counts(), request, choices[0], network, clip=options.clip)
    if options.as_json:
        alone = predict_choice("roundpipe", request, choices).document()
        nodes = [prediction.document() for prediction in predictions]
        sizes = {"network_gb_per_s": network.gb_per_s, "network_latency_ms": network.latency_ms}
        typer.echo(json.dumps({**options.document(request), **sizes, "schedules": [alone], "nodes": nodes}, indent=2))
    else:
        speed = f"{8 * network.gb_per_s:,.4g} Gb/s" if network.gb_per_s else "without limit"
        how = f"each node {options.setting(request)}; network {speed}, latency {network.latency_ms:g} ms"
        _print_nodes(f"{request.costs.name}: {how}{', clipping' if options.clip else ''}", predictions)
        typer.echo(f"plan: {choices[0].cut}\nnotation: {STAGES_LEGEND}")
    if options.draws:
        rows = [
            (
                f"{_count(prediction)}: {prediction.step_ms:,.1f} ms a step, {prediction.efficiency_percent:.1f} %",
                _spans(prediction.links.timeline, prediction.plans, options.steps_shown, prediction.links),
            )
            for prediction in predictions
        ]
        options.write_pictures(rows, f"{request.costs.name}, each node {options.setting(request)}")


def _count(prediction: NodesPrediction) -> str:
    return "1 node" if prediction.nodes == 1 else f"{prediction.nodes} nodes"


def _print_nodes(title: str, predictions: list[NodesPrediction]) -> None:
    columns = ["step ms", "efficiency %", "network busy ms", "exposed ms", "microbatches/s", "tokens/s", "limited by"]
    rows = [
        [
            str(prediction.nodes),
            f"{prediction.step_ms:,.1f}",
            f"{prediction.efficiency_percent:.1f}",
            f"{prediction.network_busy_ms:,.1f}",
            f"{prediction.exposed_ms:,.1f}",
            f"{prediction.microbatches_per_s:,.2f}",
            "?" if prediction.tokens_per_s is None else f"{prediction.tokens_per_s:,.0f}",
            prediction.limited_by,
        ]
        for prediction in predictions
    ]
    print_table(title, columns, rows, of_rows="nodes")


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


def _spans(
    timeline: _core.Timeline, plans: list[_core.Plan], steps: int, links: _core.LinkTimeline | None
) -> list[Span]:
    from roundpipe.planning.pictures import spans_of, spans_of_transfers, steady_window

    window = steady_window(timeline, plans, steps)
    spans = spans_of(timeline, plans, window)
    return spans if links is None else spans + spans_of_transfers(links, window)


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
