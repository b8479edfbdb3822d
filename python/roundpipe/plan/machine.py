"""Machine files: devices, links and host, for `roundpipe plan`.

A machine file is TOML, as `roundpipe plan --measure` writes it. Everything except `schema`, `version` and `devices` may
be omitted; a rate that is not given, or 0, is infinite. The network between nodes is not measured; with `--nodes`, its
bandwidth has to be given here or as an option:

    schema = "roundpipe-machine"
    version = 1
    name = "two cards on one host"
    link_up_gb_per_s = 25.0    # of each device, host to device; 1e9 bytes per second
    link_down_gb_per_s = 25.0  # of each device, device to host
    host_gb_per_s = 40.0       # of the host's memory: all links and the optimizer's updates together
    update_gb_per_s = 3.5      # weights that the host's optimizer updates while the links rest
    network_gb_per_s = 1.25    # of a node, in each direction at once: 10 Gb/s
    network_latency_ms = 0.5   # of a collective among the nodes, besides its bytes
    disk_write_gb_per_s = 3.0  # of the disk for moments, while nothing is read
    disk_read_gb_per_s = 6.0   # while nothing is written
    disk_both_gb_per_s = 2.4   # that are read, and as many that are written beside them

    [[devices]]
    count = 2
    speed = 1.0                # divides the times of a cost file
    memory_bytes = 24000000000

    [card]                     # of speed 1; see roundpipe.plan.cards
    product_tflops = { bf16 = 150.0, fp32 = 60.0 }
    attention_tflops = 140.0
    memory_gb_per_s = 930.0
    launch_us = 4.5
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe import _core
from roundpipe.files import read_toml, write_text
from roundpipe.plan import cards
from roundpipe.plan.cards import Card
from roundpipe.plan.costs import RATES, CostSet, devices_of, milliseconds_of, name_of, object_of, rate_of

if TYPE_CHECKING:
    from roundpipe.model.run_records import RunRecords

SCHEMA = "roundpipe-machine"
VERSION = 1

_DISK = ("disk_write_gb_per_s", "disk_read_gb_per_s", "disk_both_gb_per_s")
_NETWORK = ("network_gb_per_s", "network_latency_ms")


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine as the planner sees it.

    Attributes:
        devices: speed, relative to that of a cost file's times, and memory in bytes of each; 0 bytes = unlimited.
        rates: bandwidths in GB/s, by field name.
        update_gb_per_s: weights that the host's optimizer updates while the links rest; 0 = no limit.
        network_gb_per_s: of a node, in each direction at once; 0 = infinite, None = not given.
        network_latency_ms: of a collective among nodes, besides its bytes; None = not given.
        card: of a device of speed 1; None = not given.
        disk: bandwidths in GB/s of the disk for moments, by field name; empty = not given.
    """

    name: str
    devices: list[tuple[float, int]]
    rates: dict[str, float]
    update_gb_per_s: float = 0.0
    network_gb_per_s: float | None = None
    network_latency_ms: float | None = None
    card: Card | None = None
    disk: dict[str, float] = dataclasses.field(default_factory=dict)

    def costs(self, costs: CostSet) -> CostSet:
        """These costs on this machine."""
        return dataclasses.replace(costs, devices=self.devices, rates=dict.fromkeys(RATES, 0.0) | self.rates)

    def text(self) -> str:
        """The machine file."""
        lines = [f'schema = "{SCHEMA}"', f"version = {VERSION}", f"name = {json.dumps(self.name)}"]
        lines += [f"{name} = {rate!r}" for name, rate in self.rates.items()]
        lines.append(f"update_gb_per_s = {self.update_gb_per_s!r}")
        lines += [f"{name} = {rate!r}" for name, rate in self.disk.items()]
        network = {name: getattr(self, name) for name in _NETWORK}
        lines += [f"{name} = {value!r}" for name, value in network.items() if value is not None]
        for (speed, memory_bytes), alike in itertools.groupby(self.devices):
            lines += ["", "[[devices]]", f"count = {len(list(alike))}", f"speed = {speed!r}"]
            lines.append(f"memory_bytes = {memory_bytes}")
        lines += [] if self.card is None else ["", *self.card.lines()]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the machine file.

        Raises:
            ValueError: the file cannot be written.
        """
        write_text(Path(path), self.text())


def measure_disk(folder: str, gb: float) -> dict[str, float]:
    """What the disk of `folder` reaches, by field name of a machine file; it is written 2 x `gb` GB.

    Raises:
        RuntimeError: the disk does not take them.
    """
    speed = _core.measure_disk(folder, int(gb * 1e9))
    return {name: float(f"{getattr(speed, name.removeprefix('disk_')):.4g}") for name in _DISK}


def measured(model: RunRecords) -> Machine:
    """The machine as the calls of `model` have measured it: nothing is moved to measure.

    With `roundpipe.plan.costs.save(model.costs(), ...)`, `roundpipe plan --machine` plans for a run as it was. If
    links have slowed each other, the command shares their bandwidth with updates, though the run has measured both
    beside each other: then it predicts too long a step rather than too short a one.

    Raises:
        ValueError: the layers, a link's direction or the optimizer have not been measured.
    """
    found = model.machine()
    if not model.costs_are_measured:
        raise ValueError(
            "[machine] the model has made too few training steps to be measured, expected at least three; train a few "
            "steps first, or measure the machine with roundpipe plan --measure"
        )
    figures = (
        ("link up", found.link_up_gb_per_s),
        ("link down", found.link_down_gb_per_s),
        ("optimizer", found.update_gb_per_s),
    )
    for what, rate in figures:
        if not rate:
            raise ValueError(
                f"[machine] no rate of the {what} has been measured: nothing kept it busy for long enough; train more "
                "or with larger layers, or measure the machine with roundpipe plan --measure"
            )
    return Machine(
        name=", ".join(dict.fromkeys(_core.Engine.current().device_names())),
        devices=[(round(speed, 3), memory_bytes) for speed, memory_bytes in found.devices],
        rates={name: float(f"{getattr(found, name):.4g}") for name in RATES},
        update_gb_per_s=float(f"{found.update_gb_per_s:.4g}"),
    )


def load(path: str | Path) -> Machine:
    """Reads a machine file.

    Raises:
        ValueError: the file cannot be read or is no machine file; the message names the field.
    """
    try:
        fields = object_of(
            read_toml(path, "machine", "a machine file"),
            str(path),
            ("schema", "version", "name", "devices", "update_gb_per_s", "card", *_NETWORK, *_DISK, *RATES),
        )
        if fields.get("schema") != SCHEMA or type(fields.get("version")) is not int or fields["version"] != VERSION:
            raise ValueError(f"[costs] {path} has no schema '{SCHEMA}' of version {VERSION}")
        devices = devices_of(fields.get("devices", []))
        if not devices:
            raise ValueError(f"[costs] {path} has no devices, expected at least one [[devices]]")
        rates = {name: rate_of(fields[name], name) for name in RATES if name in fields}
        update = rate_of(fields.get("update_gb_per_s", 0), "update_gb_per_s")
        bandwidth, latency = (fields.get(name) for name in _NETWORK)
        return Machine(
            name_of(fields, str(path)),
            devices,
            rates,
            update,
            network_gb_per_s=None if bandwidth is None else rate_of(bandwidth, "network_gb_per_s"),
            network_latency_ms=None if latency is None else milliseconds_of(latency, "network_latency_ms"),
            card=cards.parse(fields["card"]) if "card" in fields else None,
            disk={name: rate_of(fields[name], name) for name in _DISK if name in fields},
        )
    except ValueError as error:
        raise ValueError(str(error).replace("[costs]", "[machine]", 1)) from None
