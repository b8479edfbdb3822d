"""Cost files: the costs of a model's layers and of the machine.

A cost file is JSON, or TOML with the same fields if its name ends in .toml. Everything except `schema`, `version` and
`layers` may be omitted:

    {
      "schema": "roundpipe-costs", "version": 1, "name": "my model",
      "layers": [{"count": 32, "forward_ms": 18.5, "backward_ms": 41.2, "recompute_ms": 18.5,
                  "weight_bytes": 435000000, "gradient_bytes": 435000000,
                  "activation_bytes": 67108864, "saved_bytes": 1140000000, "trainable": true}],
      "head": {"forward_ms": 37.2, "backward_ms": 74.5},
      "hop_latency_ms": 3.2, "tokens": 8192,
      "devices": [{"count": 8, "speed": 1.0, "memory_bytes": 24000000000}],
      "link_up_gb_per_s": 25, "link_down_gb_per_s": 25, "host_gb_per_s": 200,
      "baseline_stages": {"pipeline": [4, 4], "chunks": [1, 1], "forward": [5, 5], "backward": [2, 2]}
    }

Times are for one microbatch on a device of speed 1. `backward_ms` excludes the recompute; `recompute_ms` defaults to
`forward_ms`. `gradient_bytes` defaults to `weight_bytes`, or to 0 for a layer that is not trainable. The head is one
more layer at the end; without one, the last layer takes its place. `tokens` are those of a microbatch, for tokens per
second.

There are at most 2,000 layers, which take at most 1e12 ms and 1e14 bytes of each kind together, and at most 1,024
devices.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from roundpipe import _core
from roundpipe.files import read_json, read_toml, write_text
from roundpipe.following.layers.shell import layers_of

SCHEMA = "roundpipe-costs"
VERSION = 1

_LAYER_FIELDS = (
    *("forward_ms", "backward_ms", "recompute_ms"),
    *("weight_bytes", "gradient_bytes", "activation_bytes", "saved_bytes"),
)
# bf16 with fused attention: of real layers 50 to 100 bytes per token and hidden unit stay for the backward.
_SAVED_PER_BOUNDARY = 30
# Bytes per token and hidden unit that the head keeps, with its loss in chunks.
_HEAD_SAVED = 45
RATES = ("link_up_gb_per_s", "link_down_gb_per_s", "host_gb_per_s")
_SIZES = ("pipeline", "chunks", "forward", "backward")
# Beyond these, a search takes minutes, or sums of times lose their digits and sums of bytes their 63 bits.
_MOST_LAYERS = 2000
MOST_DEVICES = 1024
_MOST_MS = 1e12
_MOST_BYTES = 10**14
_MOST_MEMORY_BYTES = 10**18
_MOST_TOKENS = 10**12
_SPEEDS = (1e-6, 1e6)
# GB/s of a link, and of the host's optimizer.
RATES_RANGE = (1e-6, 1e9)


@dataclasses.dataclass
class CostSet:
    """Costs of a model and, if known, of its machine.

    Attributes:
        layers: one entry for each layer, the head last.
        first_backward_layer: layers below need no backward.
        hop_latency_ms: from one device to another.
        devices: speed and memory (bytes, 0 = unlimited) of each; empty if the file lists none.
        rates: link and host bandwidths in GB/s, by field name.
        stages: number of layers in each stage of the schedules to compare with; None balances them.
        tokens: of a microbatch; None = not known.
        on_host_cores: whether the devices are virtual: the same cores compute, move and update.
    """

    name: str
    layers: list[_core.LayerCost]
    first_backward_layer: int = 0
    hop_latency_ms: float = 0.0
    devices: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    stages: _core.BaselineSizes | None = None
    tokens: int | None = None
    on_host_cores: bool = False

    def __post_init__(self) -> None:
        if len(self.layers) > _MOST_LAYERS:
            raise ValueError(f"[costs] {self.name} has {len(self.layers)} layers, expected at most {_MOST_LAYERS}")
        for field in _LAYER_FIELDS:
            total = sum(getattr(cost, field) or 0 for cost in self.layers)
            if not total <= _most(field):
                raise ValueError(
                    f"[costs] the layers of {self.name} have {total:g} {field} together, expected at most "
                    f"{_most(field):g}"
                )

    def cluster(
        self,
        devices: int | None,
        memory_bytes: int | Sequence[int] | None = None,
        with_links: bool = False,
        resident_bytes: int = 0,
    ) -> _core.Cluster:
        """The machine with `devices` devices; None takes those of the file.

        Args:
            memory_bytes: of every device, or of each; None takes the file's.
            with_links: use the file's bandwidths instead of the hop latency, which stands for the same transfers.
            resident_bytes: of frozen weights that each device keeps.
        """
        specs = list(self.devices)
        if devices is not None and devices != len(specs):
            if len(set(specs)) > 1:
                raise ValueError(
                    f"[costs] {self.name} names {len(specs)} devices that are not alike, expected --devices "
                    f"{len(specs)} or none; edit 'devices' in the file"
                )
            specs = (specs[:1] or [(1.0, 0)]) * devices
        if not specs:
            specs = [(1.0, 0)] * 8
        if memory_bytes is not None:
            sizes = [memory_bytes] * len(specs) if isinstance(memory_bytes, int) else memory_bytes
            specs = [(speed, size) for (speed, _), size in zip(specs, sizes, strict=True)]
        if not with_links:
            return _core.Cluster(devices=specs, hop_latency_ms=self.hop_latency_ms)
        if not self.rates:
            raise ValueError(
                f"[costs] {self.name} names no bandwidths, expected link_up_gb_per_s, link_down_gb_per_s or "
                "host_gb_per_s for --links"
            )
        return _core.Cluster(
            devices=specs, resident_bytes=resident_bytes, on_host_cores=self.on_host_cores, **self.rates
        )


def load(source: str) -> CostSet:
    """Loads the preset of that name, or the cost file at that path.

    Raises:
        ValueError: the preset or file does not exist, or is not a cost file; the message names the invalid field.
    """
    if source in PRESETS:
        return parse(PRESETS[source], source)
    try:
        is_file = Path(source).is_file()
    except OSError:
        is_file = False  # a name that no file can have
    if not is_file:
        raise ValueError(
            f"[costs] there is no file {reprlib.repr(source)} and no preset of that name; expected a cost file or one "
            "of " + ", ".join(PRESETS)
        )
    read = read_toml if Path(source).suffix == ".toml" else read_json
    return parse(read(source, "costs", "a cost file"), source)


def save(layers: list[_core.LayerCost], path: str | Path, name: str) -> None:
    """Writes costs, measured (`RoundPipe.costs()`) or estimated, to a cost file, with the last layer as its head.

    Raises:
        ValueError: there are no layers, or the file cannot be written.
    """
    if not layers:
        raise ValueError("[costs] there are no layers, expected at least one")
    entries = [
        {field: getattr(cost, field) for field in _LAYER_FIELDS if getattr(cost, field) is not None}
        | {"trainable": cost.trained}
        for cost in layers
    ]
    document: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "name": name, "layers": entries}
    write_text(Path(path), json.dumps(document, indent=1) + "\n")


def estimate(model: nn.Module, tokens: int, width: int, device_tflops: float) -> list[_core.LayerCost]:
    """Estimates the costs of a model that has not run, from its shapes.

    A token takes 2 floating-point operations per parameter in the forward and 4 in the backward (arXiv:2001.08361,
    section 2.1). Attention over long sequences takes more, which is ignored.

    Args:
        model: its children are the layers if it is an `nn.Sequential` or a `RoundPipe` of one, else it is one layer.
        tokens: tokens in one microbatch.
        width: number of values per token between two layers.
        device_tflops: a device's achieved (not advertised) speed, in 1e12 operations per second.

    Raises:
        ValueError: a number is not positive.
    """
    for field, value in (("tokens", tokens), ("width", width), ("device_tflops", device_tflops)):
        if not value > 0:
            raise ValueError(f"[estimate] {field} is {value}, expected a number above 0")
    costs = []
    for _, layer in layers_of(model):
        parameters = list(layer.parameters())
        weight_bytes = sum(parameter.nbytes for parameter in parameters)
        trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        item_bytes = parameters[0].element_size() if parameters else 4
        forward_ms = 2 * sum(parameter.numel() for parameter in parameters) * tokens / (device_tflops * 1e9)
        boundary = tokens * width * item_bytes
        costs.append(
            _core.LayerCost(
                forward_ms=forward_ms,
                backward_ms=2 * forward_ms,
                weight_bytes=weight_bytes,
                gradient_bytes=trained_bytes,
                trained=any(parameter.requires_grad for parameter in parameters),
                activation_bytes=boundary,
                saved_bytes=_SAVED_PER_BOUNDARY * boundary,
            )
        )
    return costs


def parse(document: Any, source: str) -> CostSet:
    """Makes costs from a cost file that has been read as JSON; `source` names the file in errors."""
    own = ("schema", "version", "name", "layers", "head", "hop_latency_ms", "tokens", "devices", "baseline_stages")
    fields = object_of(document, "the file", (*own, *RATES))
    if fields.get("schema") != SCHEMA:
        raise ValueError(f"[costs] schema is {reprlib.repr(fields.get('schema'))}, expected '{SCHEMA}'")
    version = fields.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"[costs] version is {reprlib.repr(version)}, expected {VERSION}")
    entries = _list(fields.get("layers"), "layers")
    if not entries:
        raise ValueError("[costs] layers is empty, expected at least one layer")
    layers: list[_core.LayerCost] = []
    trainable: list[bool] = []
    for index, entry in enumerate(entries):
        where = f"layers[{index}]"
        cost, trains = _layer(entry, where, ("count",))
        count = _count(entry, where, _MOST_LAYERS)
        layers += [cost] * count
        trainable += [trains] * count
    if "head" in fields:
        cost, trains = _layer(fields["head"], "head", ())
        layers.append(cost)
        trainable.append(trains)
    return CostSet(
        name=name_of(fields, source),
        layers=layers,
        first_backward_layer=trainable.index(True) if True in trainable else len(layers),
        hop_latency_ms=milliseconds_of(fields.get("hop_latency_ms", 0), "hop_latency_ms"),
        devices=devices_of(fields.get("devices", [])),
        rates={name: rate_of(fields[name], name) for name in RATES if name in fields},
        stages=_stages(fields["baseline_stages"]) if "baseline_stages" in fields else None,
        tokens=int(_number(fields["tokens"], "tokens", 1, _MOST_TOKENS)) if "tokens" in fields else None,
    )


def devices_of(value: Any) -> list[tuple[float, int]]:
    """Speed and memory of each device, from the list of a file."""
    devices: list[tuple[float, int]] = []
    for index, entry in enumerate(_list(value, "devices")):
        where = f"devices[{index}]"
        spec = object_of(entry, where, ("count", "speed", "memory_bytes"))
        speed = _number(spec.get("speed", 1.0), f"{where}.speed", *_SPEEDS)
        memory = _number(spec.get("memory_bytes", 0), f"{where}.memory_bytes", 0, _MOST_MEMORY_BYTES)
        devices += [(float(speed), int(memory))] * _count(spec, where, MOST_DEVICES)
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"[costs] devices are {len(devices)}, expected at most {MOST_DEVICES}")
    return devices


def name_of(fields: dict[str, Any], source: str) -> str:
    """The name in a file, else that of the file."""
    stem = Path(source).stem
    name = fields.get("name", stem if stem.isprintable() else "costs")
    if not isinstance(name, str) or not name.isprintable() or len(name) > 200:
        raise ValueError(f"[costs] name is {reprlib.repr(name)}, expected one line of at most 200 letters")
    return name


def object_of(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[costs] {where} is a {type(value).__name__}, expected an object")
    for name in value:
        if name not in known:
            raise ValueError(
                f"[costs] {where} has an unknown field {reprlib.repr(name)}, expected one of {', '.join(known)}"
            )
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"[costs] {where} is a {type(value).__name__}, expected a list")
    return value


def _number(value: Any, where: str, least: float, most: float) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"[costs] {where} is {reprlib.repr(value)}, expected a number from {least:g} to {most:g}")
    return value


def rate_of(value: Any, where: str) -> float:
    # 0 is a link without a limit.
    return 0.0 if value == 0 and not isinstance(value, bool) else float(_number(value, where, *RATES_RANGE))


def milliseconds_of(value: Any, where: str) -> float:
    return float(_number(value, where, 0, _MOST_MS))


def _most(field: str) -> float:
    return _MOST_BYTES if field.endswith("_bytes") else _MOST_MS


def _count(entry: dict[str, Any], where: str, most: int) -> int:
    count = entry.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ValueError(f"[costs] {where}.count is {reprlib.repr(count)}, expected a whole number from 1 to {most}")
    return count


def _layer(entry: Any, where: str, more: tuple[str, ...]) -> tuple[_core.LayerCost, bool]:
    fields = object_of(entry, where, (*_LAYER_FIELDS, "trainable", *more))
    for name in ("forward_ms", "backward_ms"):
        if name not in fields:
            raise ValueError(f"[costs] {where}.{name} is missing, expected milliseconds of one microbatch")
    trains = fields.get("trainable", True)
    if not isinstance(trains, bool):
        raise ValueError(f"[costs] {where}.trainable is {reprlib.repr(trains)}, expected true or false")
    values: dict[str, Any] = {}
    for name in _LAYER_FIELDS:
        if name in fields:
            number = _number(fields[name], f"{where}.{name}", 0, _most(name))
            values[name] = int(number) if name.endswith("_bytes") else float(number)
    values.setdefault("gradient_bytes", values.get("weight_bytes", 0) if trains else 0)
    return _core.LayerCost(**values, trained=trains), trains


def _stages(value: Any) -> _core.BaselineSizes:
    fields = object_of(value, "baseline_stages", _SIZES)
    sizes = _core.BaselineSizes()
    for name in _SIZES:
        stages = _list(fields.get(name, []), f"baseline_stages.{name}")
        if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _MOST_LAYERS for n in stages):
            raise ValueError(f"[costs] baseline_stages.{name} is {reprlib.repr(stages)}, expected numbers of layers")
        setattr(sizes, name, stages)
    return sizes


def _preset(
    name: str,
    times: tuple[int, float, float, float, float, float],
    hidden: int,
    layer_bytes: int,
    saved_per_unit: int,
    vocabulary: int,
    stages: dict[str, list[int]],
    lora: bool = False,
) -> dict[str, Any]:
    count, forward_ms, backward_ms, head_forward_ms, head_backward_ms, hop_ms = times
    tokens = 8192
    boundary = 2 * tokens * hidden
    layer = {"activation_bytes": boundary, "saved_bytes": saved_per_unit * tokens * hidden}
    head_bytes = 2 * vocabulary * hidden
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": name,
        "layers": [
            {
                "count": count,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "weight_bytes": layer_bytes,
                "gradient_bytes": 0 if lora else layer_bytes,
                **layer,
            }
        ],
        "head": {
            "forward_ms": head_forward_ms,
            "backward_ms": head_backward_ms,
            "weight_bytes": head_bytes,
            "gradient_bytes": 0 if lora else head_bytes,
            "trainable": not lora,
            "activation_bytes": 0,
            "saved_bytes": _HEAD_SAVED * tokens * hidden,
        },
        "hop_latency_ms": hop_ms,
        "tokens": tokens,
        "devices": [{"count": 8, "memory_bytes": 24_000_000_000}],
        "link_up_gb_per_s": 25,
        "link_down_gb_per_s": 25,
        "host_gb_per_s": 200,
        "baseline_stages": stages,
    }


# Layer times, hops and stages as published for eight 24 GB cards and sequences of 8,192 tokens in a microbatch; bytes
# follow from the models' shapes in bf16: what a layer keeps is what `roundpipe plan` counts.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": _preset(
        "qwen3-1.7b",
        (28, 7.429, 15.831, 22.0655, 43.707, 1.6),
        2048,
        100_000_000,
        57,
        151_936,
        {
            "pipeline": [3, 3, 4, 4, 4, 4, 4, 2],
            "chunks": [1] * 18 + [2] * 5 + [0],
            "forward": [7, 7, 7, 7],
            "backward": [3] * 8 + [2, 2],
        },
    ),
    "llama3.1-8b": _preset(
        "llama3.1-8b",
        (32, 18.504, 41.207, 37.2255, 74.501, 3.2),
        4096,
        435_000_000,
        51,
        128_256,
        {"pipeline": [4] * 8, "chunks": [1] * 32, "forward": [5, 5, 5, 5, 6, 6], "backward": [2] * 16},
    ),
    "gpt-oss-20b": _preset(
        "gpt-oss-20b",
        (24, 21.645, 81.781, 44.2925, 86.264, 2.25),
        2880,
        1_645_000_000,
        103,
        201_088,
        {"pipeline": [3] * 8, "chunks": [1] * 24, "forward": [4, 5, 5, 5, 5], "backward": [1] * 24},
    ),
    "qwen3-32b": _preset(
        "qwen3-32b",
        (64, 40.561, 91.174, 54.928, 108.294, 4.0),
        5120,
        975_000_000,
        76,
        151_936,
        {"pipeline": [8] * 8, "chunks": [1] * 64, "forward": [2, 2] + [3] * 20, "backward": [1] * 64},
    ),
    "qwen3-235b-lora": _preset(
        "qwen3-235b-lora",
        (94, 43.016, 58.376, 42.444, 43.294, 3.2),
        4096,
        4_975_000_000,
        81,
        151_936,
        {
            "pipeline": [11, *[12] * 6, 11],
            "chunks": [0, *[1] * 94, 0],
            "forward": [2] * 47,
            "backward": [1] * 94,
        },
        lora=True,
    ),
}
