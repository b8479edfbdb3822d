"""The options of `roundpipe plan`. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import typer

from roundpipe.command_options import EncodedFormat
from roundpipe.plan import BASELINES, PRODUCTS
from roundpipe.plan.performance.pictures import require_ending

if TYPE_CHECKING:
    from roundpipe import _core
    from roundpipe.model.memory.budget import UpdateRule
    from roundpipe.plan.cards import NamedCard
    from roundpipe.plan.costs import CostSet
    from roundpipe.plan.machine import Machine
    from roundpipe.plan.nodes import Network
    from roundpipe.plan.schedules import Request

# Of the search, in microbatch visits. A fixed rate, so that a time limit gives the same plan on every machine.
EFFORT_PER_SECOND = 300_000_000
# Those of training, and those that have moments of one byte.
Optimizer = Literal["adam", "adamw", "sgd", "lion", "adafactor", "rmsprop", "muon"]
OPTIMIZERS = get_args(Optimizer)
WITH_8BIT = ("adam", "adamw")
TOKENS = 8192
TFLOPS = 100.0
_MODES = ("async", "sync", "inference")
_MOST_TOKENS = 1 << 24
_MOST_SECONDS = 3600
_LONGEST_SHOWN = 100
# Of a collective among nodes, besides its bytes, if nothing else is said.
_LATENCY_MS = 1.0
_MOST_LATENCY_MS = 1e6
_MOST_NODES = 4096
_MOST_COUNTS = 64
# GB/s of one unit of --network, by its letters.
_PREFIXES = {"": 1e-9, "k": 1e-6, "K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_UNITS = {"B": 1.0, "b": 1 / 8, "bit": 1 / 8}


def require(ok: bool, option: str, value: object, expected: str) -> None:
    """Raises a ValueError that names the option, unless `ok`."""
    if not ok:
        shown = str(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
        raise ValueError(f"[options] --{option} is {shown}, expected {expected}")


# GB/s of a link, a network, or the host's optimizer.
_RATES_EXPECTED = "1e-06 to 1e+09"


def _is_rate(gb_per_s: float) -> bool:
    return 1e-6 <= gb_per_s <= 1e9


def _require_files(paths: dict[str, Path | None]) -> None:
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


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `roundpipe plan`, in the order of its help."""

    SCHEMA: ClassVar[str] = "roundpipe.plan/2"
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The folder (or config.json) of a transformers model, of which only the shapes are read; a cost file; "
            "or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora. Only --measure does "
            "without.",
            show_default=False,
        ),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(
            help="Number of devices (default: those of the machine or cost file, else 8).", show_default=False
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each device, such as 24GB (default: the cost file's).", show_default=False),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host, such as 512GB, which limits the plan too (default: not compared).",
            show_default=False,
        ),
    ] = None
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A machine file, as --measure writes it, in place of the cost file's devices and bandwidths. Counts "
            "every byte, as --links does.",
            show_default=False,
        ),
    ] = None
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine (the devices in ROUNDPIPE_DEVICES, else all accelerators), write it to this "
            "machine file, and plan for it if there is a MODEL.",
            show_default=False,
        ),
    ] = None
    card: Annotated[
        str | None,
        typer.Option(
            help="For a model: the devices, by name, whose layer times, memory and links follow from data sheets: "
            "rtx-3090, rtx-4090, rtx-5090 or h100.",
            show_default=False,
        ),
    ] = None
    products: Annotated[
        str | None,
        typer.Option(
            help=f"For a card: the products whose rate counts, {', '.join(PRODUCTS)} (default: bf16). Sizes stay those "
            "of bf16.",
            show_default=False,
        ),
    ] = None
    tflops: Annotated[
        float | None,
        typer.Option(
            help="For a model: 1e12 operations per second that a device reaches (default: the card of --card or of "
            f"--machine, else {TFLOPS:g}).",
            show_default=False,
        ),
    ] = None
    mode: Annotated[str, typer.Option(help="async (steps overlap, staleness one), sync or inference.")] = "async"
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Microbatches per step (default: as in training, one more than devices; fewer if the host has no room "
            "for what waits between stages).",
            show_default=False,
        ),
    ] = None
    gradient_groups: Annotated[
        int,
        typer.Option(
            help="Groups of microbatches whose gradients a step sums by themselves: devices share a backward stage by "
            "whole groups. 0 = they divide its microbatches anywhere."
        ),
    ] = 1
    max_traffic: Annotated[
        float,
        typer.Option(help="Limit of weight uploads, as a factor of one visit in each direction; 0 = no limit."),
    ] = 0.0
    keep: Annotated[
        int,
        typer.Option(
            help="Up to this many last layers keep their activations, without recompute; 1 = the head; 0 = as training "
            "does: as many as fit on one device, and on up to four that share gradient groups; else the head."
        ),
    ] = 0
    tokens: Annotated[
        int | None,
        typer.Option(help=f"For a model: tokens of a microbatch, in one row (default: {TOKENS}).", show_default=False),
    ] = None
    train: Annotated[
        str | None,
        typer.Option(
            help="For a model: full (all weights, the default) or lora (adapters of rank 16).", show_default=False
        ),
    ] = None
    quantise: Annotated[
        str | None,
        typer.Option(
            help="For a model, with --train lora: the frozen weights in fewer bits, nf4, nf4-double, mxfp4 or int8 "
            "(default: as the folder has them).",
            show_default=False,
        ),
    ] = None
    quantise_keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="With --quantise: a module that is not encoded; may be given again.",
            show_default=False,
        ),
    ] = None
    arithmetic: Annotated[
        str | None,
        typer.Option(
            help="For a model: exact (the default) or fast, with fused kernels where layers have a native form.",
            show_default=False,
        ),
    ] = None
    optimizer: Annotated[
        str, typer.Option(help=f"Update rule, which takes memory of the host: {', '.join(OPTIMIZERS)}.")
    ] = "adamw"
    moments: Annotated[str, typer.Option(help="Of adam and adamw: fp32 or 8bit.")] = "fp32"
    masters: Annotated[str, typer.Option(help="Of bf16 weights: fp32 or 24bit.")] = "fp32"
    disk: Annotated[
        str | None,
        typer.Option(
            help="For a model: plan for a training with this --disk, whose rates --machine has. --measure measures "
            "them.",
            show_default=False,
        ),
    ] = None
    disk_memory: Annotated[
        str | None,
        typer.Option(
            help="With --disk: what it may hold may still take of memory (default: the least at full speed).",
            show_default=False,
        ),
    ] = None
    disk_holds: Annotated[
        str, typer.Option(help="With --disk: moments, or masters, which are those of 16-bit weights as well.")
    ] = "moments"
    disk_endurance: Annotated[
        str | None,
        typer.Option(
            help="With --disk: what the disk is rated to be written in its life (TBW), such as 600TB.",
            show_default=False,
        ),
    ] = None
    gradients_at_once: Annotated[
        bool,
        typer.Option(
            "--gradients-at-once",
            help="For a model, with --mode sync: gradients are used as they come, in room for a few layers' only.",
        ),
    ] = False
    links: Annotated[
        bool,
        typer.Option("--links", help="Simulate every byte over the cost file's links, not a fixed hop latency."),
    ] = False
    update_rate: Annotated[
        float,
        typer.Option(
            help="With --links: GB of weights that the host's optimizer updates per second; 0 = as many as the host's "
            "memory lets it."
        ),
    ] = 0.0
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Predict the step on so many equal nodes, or on each of several numbers with commas: 1,2,4. Counts "
            "every byte, as --links does.",
            show_default=False,
        ),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(
            help="With --nodes: a node's bandwidth in each direction, such as 10Gb/s or 1.25GB/s (default: the machine "
            "file's).",
            show_default=False,
        ),
    ] = None
    network_latency: Annotated[
        float | None,
        typer.Option(
            help="With --nodes: milliseconds of each collective, besides its bytes (default: the machine file's, else "
            f"{_LATENCY_MS:g}).",
            show_default=False,
        ),
    ] = None
    clip: Annotated[
        bool,
        typer.Option(
            "--clip", help="With --nodes: updates wait for the step's last gradient, as clipping and loss scales need."
        ),
    ] = False
    compare: Annotated[
        str | None,
        typer.Option(
            help=f"Show the schedules of other systems beside ours: {', '.join(BASELINES)}, several with commas, or "
            "all.",
            show_default=False,
        ),
    ] = None
    search_seconds: Annotated[
        float | None,
        typer.Option(
            help=f"Effort of the search, as seconds of an idle core (default: about half a second). Each is "
            f"{EFFORT_PER_SECOND:,} visits on any machine: the same seconds always give the same plan.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the timelines: .html is a page, .png a picture, .json a trace of our schedule for "
            "chrome://tracing and Perfetto.",
            show_default=False,
        ),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(help="Write the stages to this file, for ModelExecutePlan.load.", show_default=False),
    ] = None

    def __post_init__(self) -> None:
        _require_files({"measure": self.measure, "picture": self.picture, "save": self.save})
        if self.model is None:
            if self.measure is None:
                raise ValueError(
                    "[options] there is no MODEL, expected a model's folder, a cost file or a preset; only --measure "
                    "does without"
                )
            self.refuse(
                (field.name for field in dataclasses.fields(self) if field.name not in ("model", "measure", "disk")),
                "a MODEL",
            )
        require(self.machine is None or self.measure is None, "machine", self.machine, "it without --measure")
        self._check_sizes()
        self._check_model()
        self._check_bytes()
        if self.picture is not None:
            require_ending(self.picture)
        for name in self.compared():
            if name not in BASELINES:
                raise ValueError(
                    f"[options] --compare has no schedule '{name}', expected one of {', '.join(BASELINES)} or all"
                )
            require(self.compared().count(name) == 1, "compare", self.compare, f"{name} only once")
        require(self.compare is None or self.nodes is None, "compare", self.compare, "it without --nodes")
        if self.mode == "inference":
            training = [
                "host_memory",
                "optimizer",
                "moments",
                "masters",
                "keep",
                "gradient_groups",
                "disk",
                "gradients_at_once",
                "update_rate",
                "nodes",
                "compare",
            ]
            self.refuse(training, "--mode async or sync")

    def _check_sizes(self) -> None:
        require(self.mode in _MODES, "mode", self.mode, "async, sync or inference")
        require(self.devices is None or 1 <= self.devices <= 1024, "devices", self.devices, "1 to 1024")
        count_ok = self.microbatches is None or 1 <= self.microbatches <= 4096
        require(count_ok, "microbatches", self.microbatches, "1 to 4096")
        traffic_ok = self.max_traffic >= 0 and math.isfinite(self.max_traffic)
        require(traffic_ok, "max-traffic", self.max_traffic, "0 (no limit), or a finite number above it")
        groups_ok = 0 <= self.gradient_groups <= 4096
        require(groups_ok, "gradient-groups", self.gradient_groups, "0 (anywhere) to 4096")
        require(0 <= self.keep <= 10_000, "keep", self.keep, "0 to 10000")
        seconds_ok = self.search_seconds is None or 0 <= self.search_seconds <= _MOST_SECONDS
        require(seconds_ok, "search-seconds", self.search_seconds, f"0 to {_MOST_SECONDS}")

    def _check_model(self) -> None:
        require(self.tokens is None or 1 <= self.tokens <= _MOST_TOKENS, "tokens", self.tokens, f"1 to {_MOST_TOKENS}")
        require(self.train in (None, "full", "lora"), "train", self.train, "full or lora")
        formats = get_args(EncodedFormat)
        require(self.quantise in (None, *formats), "quantise", self.quantise, f"one of {', '.join(formats)}")
        if self.train != "lora":
            self.refuse(["quantise"], "--train lora")
        if self.quantise is None:
            self.refuse(["quantise_keep"], "--quantise")
        require(self.arithmetic in (None, "exact", "fast"), "arithmetic", self.arithmetic, "exact or fast")
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        require(self.moments in ("fp32", "8bit"), "moments", self.moments, "fp32 or 8bit")
        if self.moments == "8bit":
            require(self.optimizer in WITH_8BIT, "moments", self.moments, f"fp32 for {self.optimizer}")
        require(self.masters in ("fp32", "24bit"), "masters", self.masters, "fp32 or 24bit")
        require(self.disk_holds in ("moments", "masters"), "disk-holds", self.disk_holds, "moments or masters")
        if self.mode != "sync":
            self.refuse(["gradients_at_once"], "--mode sync")
        if self.gradients_at_once:
            require(
                not self.clip, "clip", "given", "it without --gradients-at-once, which clips by the last step's norm"
            )
        require(self.tflops is None or _is_rate(self.tflops), "tflops", self.tflops, _RATES_EXPECTED)
        if self.tflops is not None:
            self.refuse(["card", "products"], "no --tflops")
        require(self.products in (None, *PRODUCTS), "products", self.products, f"one of {', '.join(PRODUCTS)}")
        if self.card is None and self.machine_path is None:
            self.refuse(["products"], "--card or --machine")

    def _check_bytes(self) -> None:
        if self.disk is None:
            self.refuse(["disk_memory", "disk_holds", "disk_endurance"], "--disk")
        elif self.measure is None:
            require(bool(self.disk_gb_per_s()), "disk", self.disk, "--measure, or disk_both_gb_per_s in --machine")
        self.disk_endurance_bytes()
        rate_ok = self.update_rate == 0 or _is_rate(self.update_rate)
        require(rate_ok, "update-rate", self.update_rate, f"0 (no limit), or {_RATES_EXPECTED}")
        if not self.counts_bytes:
            self.refuse(["update_rate"], "--links, --machine or --nodes")
        if self.nodes is None:
            self.refuse(["network", "network_latency", "clip"], "--nodes")
        self.node_counts()
        self.network_gb_per_s()
        latency = self.network_latency
        latency_ok = latency is None or 0 <= latency <= _MOST_LATENCY_MS
        require(latency_ok, "network-latency", latency, f"0 to {_MOST_LATENCY_MS:g} milliseconds")

    def refuse(self, fields: Iterable[str], needs: str) -> None:
        """Raises a ValueError for the first of these options that was given: they have no effect without `needs`."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for field in fields:
            if getattr(self, field) != defaults[field]:
                option = "json" if field == "as_json" else field.replace("_", "-")
                raise ValueError(
                    f"[options] --{option} has no effect here, expected it only with {needs}; leave it out"
                )

    @property
    def counts_bytes(self) -> bool:
        """Whether every byte is simulated."""
        return self.links or self.nodes is not None or self.machine_path is not None

    @property
    def effort(self) -> int | None:
        """Of the search, in microbatch visits; None = the default."""
        return None if self.search_seconds is None else round(EFFORT_PER_SECOND * self.search_seconds)

    @property
    def rule(self) -> UpdateRule:
        """The optimizer, which takes and moves memory of the host."""
        from roundpipe import _core
        from roundpipe.model.memory.budget import UpdateRule

        memory = 0 if self.disk_memory is None else _core.parse_bytes(self.disk_memory)
        return UpdateRule(
            self.optimizer,
            self.moments,
            masters=self.masters,
            disk=self.disk or "",
            disk_memory=memory,
            disk_holds=self.disk_holds,
            gradients_at_once=self.gradients_at_once,
        )

    def disk_gb_per_s(self) -> float:
        """What the disk for moments reads, and as much that it writes beside that; 0: there is none."""
        machine = None if self.disk is None else self.machine_file()
        return 0.0 if machine is None else machine.disk.get("disk_both_gb_per_s", 0.0)

    def disk_endurance_bytes(self) -> int | None:
        """What the disk may be written in its life; None: not given."""
        from roundpipe import _core

        return None if self.disk_endurance is None else _core.parse_bytes(self.disk_endurance)

    def compared(self) -> list[str]:
        """The names in `--compare`."""
        if self.compare is None:
            return []
        names = [name.strip() for name in self.compare.split(",")]
        # Stages of the others stay on their devices: no weights move.
        every = BASELINES[:1] if self.counts_bytes else BASELINES
        return list(every) if names == ["all"] else names

    @property
    def machine_path(self) -> Path | None:
        """The machine file."""
        return self.machine or self.measure

    def machine_file(self) -> Machine | None:
        """What the machine file says."""
        from roundpipe.plan import machine as machines

        return None if self.machine_path is None else machines.load(self.machine_path)

    def named_card(self) -> NamedCard | None:
        """What `--card` names."""
        from roundpipe.plan import cards

        return None if self.card is None else cards.named(self.card)

    def device_card(self) -> _core.Card:
        """How fast a device computes: as `--tflops` says, or else a card."""
        from roundpipe.plan.fit import card_of_tflops

        named, machine = self.named_card(), self.machine_file()
        card = named.card if named is not None else None if machine is None else machine.card
        if self.tflops is not None or card is None:
            if self.products is not None:
                raise ValueError(
                    f"[options] --machine is {self.machine_path}, which has no card, expected one with [card] for "
                    "--products, or --card"
                )
            return card_of_tflops(TFLOPS if self.tflops is None else self.tflops)
        return card.in_core(self.products or "bf16")

    def memory_bytes(self) -> int | None:
        """Memory of each device; None: that of the costs."""
        from roundpipe import _core

        named = self.named_card()
        if self.memory is None and self.machine_path is None and named is not None:
            return named.memory_bytes
        return None if self.memory is None else _core.parse_bytes(self.memory)

    def host_bytes(self) -> int | None:
        """Memory of the host; None: not limited."""
        from roundpipe import _core

        return None if self.host_memory is None else _core.parse_bytes(self.host_memory)

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
        expected = f"bits or bytes per second, such as 10Gb/s or 1.25GB/s, of {_RATES_EXPECTED} GB/s"
        require(_is_rate(rate), "network", self.network, expected)
        return rate

    def network_of_nodes(self) -> Network:
        """What connects the nodes: by the options, else by the machine file."""
        from roundpipe.plan.nodes import Network

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

    def request(self, costs: CostSet) -> Request:
        """The schedule to plan."""
        from roundpipe.plan.schedules import Request

        named, machine = self.named_card(), self.machine_file()
        if machine is not None:
            costs = machine.costs(costs)
        elif named is not None:
            link = named.link_gb_per_s
            costs = dataclasses.replace(costs, rates={"link_up_gb_per_s": link, "link_down_gb_per_s": link})
        cluster = costs.cluster(self.devices, self.memory_bytes())
        request = Request(
            costs=costs,
            cluster=cluster,
            # As in training.
            microbatches=len(cluster) + 1 if self.microbatches is None else self.microbatches,
            mode="sync" if self.mode == "sync" else "async",
            max_traffic=self.max_traffic,
            keep_layers=self.keep,
            gradient_groups=self.gradient_groups,
            effort=self.effort,
        )
        if self.counts_bytes:
            request.links = costs.cluster(self.devices, self.memory_bytes(), with_links=True)
            own_rate = 0.0 if machine is None else machine.update_gb_per_s
            request.update_gb_per_s = self.update_rate or own_rate
            request.update_traffic = self.rule.traffic()
        return request

    def document(self, request: Request) -> dict[str, Any]:
        """The fields with which the JSON begins; `inputs` holds every option, as it was given."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "as_json"}
        return {
            "schema": self.SCHEMA,
            "inputs": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
            "costs": request.costs.name,
            "devices": request.devices,
            "microbatches": request.microbatches,
            "mode": self.mode,
        }

    def setting(self, request: Request) -> str:
        """The machine and the batch, for titles."""
        return f"{request.devices} devices, {request.microbatches} microbatches, {self.mode}"
