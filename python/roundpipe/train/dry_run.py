"""What a run would do, before anything heavy: steps, plan, time, memory, disk, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import roundpipe
from roundpipe import _core
from roundpipe.data.balance import microbatch_count
from roundpipe.data.pictures.batches import PICTURED, Largest, PictureBatches
from roundpipe.model.memory.budget import HostPrediction, is_unmeasured
from roundpipe.model.memory.host import free_host_bytes
from roundpipe.plan.fit import Fit, costs_of_shapes, fit, layers_of_shapes
from roundpipe.plan.machine import Machine
from roundpipe.plan.machine import load as load_machine
from roundpipe.plan.measure import PRODUCT_DTYPES, matmul_gflops, measure, measure_card
from roundpipe.plan.schedules import Request, predict_choice
from roundpipe.plan.shapes import ModelShapes
from roundpipe.plan.shapes import measure as measure_shapes
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData, read_data
from roundpipe.train.interface.progress import duration
from roundpipe.train.model import meta_model, pictures_of, rule_of, tokenizer_of, weights_of
from roundpipe.train.nodes import RunNodes, launched_processes
from roundpipe.train.run_folder import DATA_FOLDER, RunFolder
from roundpipe.train.tasks.samples import PAIR

# Rows are shortened by this to find what fits, and no further than this.
_SHORTER, _SHORTEST = 2, 64


@dataclass(frozen=True)
class Forecast:
    """One configuration on this machine.

    Attributes:
        shapes: with one row.
        rows: of the largest microbatch.
        microbatches: of a step.
        pictures: in this microbatch; None: the data has none.
        found: the plan, and the memory of a device.
        host: memory of the host.
        host_room: what the host has for it.
        first_pass_ms: of a step, if it measures the norm in a pass of its own.
    """

    shapes: ModelShapes
    rows: int
    microbatches: int
    pictures: int | None
    found: Fit
    host: HostPrediction
    host_room: int
    first_pass_ms: float

    @property
    def host_fits(self) -> bool:
        return self.host.total <= self.host_room

    @property
    def fits(self) -> bool:
        return self.host_fits and self.found.fits

    @property
    def step_ms(self) -> float:
        return self.first_pass_ms + self.found.step_ms


def dry_run(
    config: TrainConfig, resume: bool, say: Callable[[str], None], machine_file: str | Path | None = None
) -> bool:
    """Says what a run would do. Writes nothing into its folder.

    Args:
        machine_file: of `roundpipe plan --measure`; None measures the machine, in some seconds for each device.

    Returns:
        Whether it is predicted to fit.

    Raises:
        ValueError: the run would be refused.
    """
    if launched_processes() != "1":
        raise ValueError(
            "[train] --dry-run was started by torchrun, expected one process, as it says what one machine would do; "
            "start it without torchrun, and see roundpipe plan --nodes for several machines"
        )
    nodes = RunNodes.alone()
    folder = RunFolder(config, resume, nodes)
    if config.devices is not None:
        roundpipe.devices(config.devices)
    given = None if machine_file is None else _machine_of(machine_file)
    meta_model(config)  # which refuses what does not fit the model, before data is read
    tokenizer = tokenizer_of(config)
    pictures = pictures_of(config, tokenizer)
    with tempfile.TemporaryDirectory() as temporary:
        data = read_data(config, tokenizer, Path(temporary) / DATA_FOLDER, nodes, pictures=pictures)
        config.rate_factor(data.steps)
        say(str(data.summary))
        machine = measure(roundpipe.devices()) if given is None else given
        forecast = _forecast(config, machine, data)
        for line in _lines(config, forecast, data, machine):
            say(line)
        for line in _disk(config, forecast, folder.path, machine):
            say(line)
        say(_verdict(config, forecast, machine, data))
    return forecast.fits


def _machine_of(file: str | Path) -> Machine:
    machine = load_machine(file)
    if len(machine.devices) != len(roundpipe.devices()):
        raise ValueError(
            f"[train] {file} has {len(machine.devices)} devices, expected those of the run, which are "
            f"{len(roundpipe.devices())}; measure them with roundpipe plan --measure"
        )
    return machine


def _forecast(config: TrainConfig, machine: Machine, data: RunData) -> Forecast:
    pool = roundpipe.devices()
    group = PAIR if config.task in ("dpo", "reward") else 1  # rows that stay together
    groups = max(1, config.tokens_of_step // (group * config.length))
    largest: Largest | None = None
    if isinstance(data.train, PictureBatches):
        largest = data.train.largest(microbatch_count(groups, config.microbatches))
        groups = len(largest.batch["input_ids"])
    microbatches = microbatch_count(groups, config.microbatches)
    rows = group * math.ceil(groups / microbatches)
    device = torch.device(pool.torch_devices[0])
    shapes = _shapes(config, rows, _core.chunk_logit_bytes(str(device)), largest)
    dtype = _dtype_of(shapes)
    on_host_cores = device.type == "cpu"  # virtual devices share them
    card = _card(machine, device, dtype, len(pool) if on_host_cores else 1)
    costs = dataclasses.replace(machine.costs(costs_of_shapes(shapes, card)), on_host_cores=on_host_cores)
    layers = layers_of_shapes(shapes)
    given = None if is_unmeasured(config.device_memory) else config.device_memory
    budget = None if given is None else _core.parse_bytes(given)
    of_each = [memory if budget is None else min(budget, memory or budget) for _, memory in machine.devices]
    rule = rule_of(config)
    host = shapes.host(rule)
    disk_gb_per_s = machine.disk.get("disk_both_gb_per_s", 0.0)
    request = Request(
        costs=costs,
        cluster=costs.cluster(len(pool), of_each),
        microbatches=microbatches,
        mode="async" if config.asynchronous else "sync",
        links=costs.cluster(len(pool), of_each, with_links=True),
        update_gb_per_s=_core.update_rate_with_disk(
            machine.update_gb_per_s, disk_gb_per_s, shapes.trained_bytes, host.on_disk
        ),
        update_traffic=rule.traffic(dtype),
    )
    room = free_host_bytes() if config.host_memory is None else _core.parse_bytes(config.host_memory)
    found = fit(request, layers, of_each, host_room=room - host.total)
    host = dataclasses.replace(host, values=found.values, partial_sums=host.partial_sums + found.partial_sums)
    pictures = None if largest is None else largest.pictures
    first_pass_ms = _first_pass_ms(found) if config.clip_by == "two_passes" else 0.0
    return Forecast(shapes, rows, microbatches, pictures, found, host, room, first_pass_ms)


def _card(machine: Machine, device: torch.device, dtype: torch.dtype, sharing: int) -> _core.Card:
    """The machine's card for products of a dtype. What it has no rate of is measured on the device."""
    card = machine.card or measure_card(device)
    kind = next((kind for kind, of_kind in PRODUCT_DTYPES.items() if of_kind == dtype), str(dtype))
    if kind not in card.product_tflops:
        card = dataclasses.replace(card, product_tflops={kind: matmul_gflops(device, dtype) / 1000})
    return card.shared(sharing).in_core(kind)


def _first_pass_ms(found: Fit) -> float:
    """What a pass takes that only measures gradients: each is read once, and nothing is updated."""
    request = dataclasses.replace(found.request, update_gb_per_s=0.0, update_traffic=1.0)
    return predict_choice("first pass", request, found.choices).step_ms


def _shapes(config: TrainConfig, rows: int, chunk_logit_bytes: int, largest: Largest | None) -> ModelShapes:
    return measure_shapes(
        meta_model(config, causal=True),
        config.length,
        Path(weights_of(config)).name,
        rows,
        chunk_logit_bytes,
        config.arithmetic,
        None if largest is None else largest.batch[PICTURED](largest.places),
    )


def _dtype_of(shapes: ModelShapes) -> torch.dtype:
    return next(shapes.model.parameters()).dtype


def _lines(config: TrainConfig, forecast: Forecast, data: RunData, machine: Machine) -> Iterator[str]:
    shapes, best = forecast.shapes, forecast.found.choices[0]
    dtype = str(_dtype_of(shapes)).removeprefix("torch.")
    yield (
        f"model    {shapes.parameters / 1e6:,.2f} M parameters in {dtype}, of which {shapes.trained / 1e6:,.2f} M are "
        f"trained; arithmetic {shapes.arithmetic}"
    )
    yield (
        f"steps    {data.steps:,} of at most {config.tokens_of_step:,} tokens, in {forecast.microbatches} microbatches "
        f"of at most {forecast.rows} rows"
    )
    if note := config.note_of_few_steps(data.steps):
        yield note
    if forecast.pictures is not None:
        yield f"pictures {forecast.pictures:,} in the microbatch with the most of them, for which memory is predicted"
    yield f"devices  {roundpipe.devices().description}"
    yield f"plan     {best.cut}"
    speed = config.tokens_of_step / forecast.step_ms * 1000 if forecast.step_ms else 0.0
    parts = ((forecast.first_pass_ms, "measure the norm"), (forecast.found.again_ms, "recompute layer by layer"))
    more = " and ".join(f"{ms:,.1f} ms {what}" for ms, what in parts if ms)
    more = f", of which {more}" if more else ""
    yield (
        f"step     {forecast.step_ms:,.1f} ms (predicted){more}, limited by {best.limit}; {speed:,.0f} tokens/s "
        "if rows are full"
    )
    rates = machine.rates
    yield (
        f"measured links {rates['link_up_gb_per_s']:.2f} up {rates['link_down_gb_per_s']:.2f} down GB/s, host "
        f"{rates['host_gb_per_s'] or math.inf:.2f} GB/s, optimizer {machine.update_gb_per_s:.2f} GB/s"
    )
    times = 1 + (data.steps // config.evaluate_every if config.evaluate_every is not None else 1)
    # A forward takes about a third of a pass with updates.
    seconds = (data.steps * forecast.step_ms + times * len(data.held_out) / 3 * best.step_ms) / 1000
    yield f"time     {duration(seconds)} (predicted), or {seconds / 3600:.2f} hours, with {times} evaluations"
    if config.task in ("dpo", "kto"):
        count = len(data.samples) + len(data.held_out_samples)
        yield f"before   the reference is asked about {count:,} samples, which the time does not count"
    if config.task == "kto":
        yield "besides  a forward of as many rows in each step, which the time does not count either"
    device = forecast.found.device
    has = f" of {_size(forecast.found.memory)}" if forecast.found.memory else ""
    yield f"device   {_size(device.total)}{has} (predicted): {_rows_text(device.rows())}"
    yield (
        f"host     {_size(forecast.host.total)} of {_size(forecast.host_room)} (predicted): "
        f"{_rows_text(forecast.host.rows())}"
    )


def _disk(config: TrainConfig, forecast: Forecast, out: Path, machine: Machine) -> Iterator[str]:
    import shutil

    element = next(forecast.shapes.model.parameters()).element_size()
    result = forecast.shapes.trained * element
    checkpoint = result + forecast.host.masters + forecast.host.moments + forecast.host.on_disk
    count = 1 if config.save_every is None else config.keep + 1

    def free(folder: Path) -> str:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        return f"{_size(shutil.disk_usage(there).free)} free"

    yield (
        f"disk     {_size(result + count * checkpoint)} of {free(out)}: the result {_size(result)}, "
        f"{count} x {_size(checkpoint)} for checkpoints"
    )
    if config.disk is not None:
        yield (
            f"{config.disk_holds:8} {_size(forecast.host.on_disk)} of {free(Path(config.disk))} in {config.disk}, read "
            "and written in each step"
            + ("" if machine.disk else "; how long that takes is not predicted, see roundpipe plan --measure --disk")
        )


def _verdict(config: TrainConfig, forecast: Forecast, machine: Machine, data: RunData) -> str:
    if forecast.fits:
        return "fits (predicted)"
    short = []
    if not forecast.host_fits:
        short.append(f"the host needs {_size(forecast.host.total)} of {_size(forecast.host_room)}")
    if not forecast.found.fits:
        short.append(f"a device needs {_size(forecast.found.device.total)} of {_size(forecast.found.memory)}")
    for change, changed in _changes(config, forecast):
        if _forecast(changed, machine, data).fits:
            return f"does not fit (predicted): {'; '.join(short)}; it would with {change}"
    return f"does not fit (predicted): {'; '.join(short)}; give it more memory, or take a smaller model"


def _changes(config: TrainConfig, forecast: Forecast) -> Iterator[tuple[str, TrainConfig]]:
    """Changes that may make it fit, the smallest first."""
    all_rows = forecast.rows * forecast.microbatches
    if forecast.pictures is None:
        all_rows = max(1, config.tokens_of_step // config.length)
    if forecast.rows > 1 and not forecast.found.fits:
        yield f"--microbatches {all_rows}", dataclasses.replace(config, microbatches=all_rows)
    if not forecast.host_fits:
        yield from _of_the_optimizer(config, _dtype_of(forecast.shapes))
    if not config.trains_adapters:
        yield "--lora", dataclasses.replace(config, lora=True)
    length = config.length if forecast.pictures is None else 0  # a shorter one leaves samples out
    while not forecast.found.fits and length // _SHORTER >= _SHORTEST:
        length //= _SHORTER
        yield f"--length {length}", dataclasses.replace(config, length=length, microbatches=None, batch_tokens=None)


def _of_the_optimizer(config: TrainConfig, weights: torch.dtype) -> Iterator[tuple[str, TrainConfig]]:
    """The changes with which it takes less of the host."""
    steps = _core.Steps.ASYNCHRONOUS if config.asynchronous else _core.Steps.SYNCHRONOUS
    for way in rule_of(config).narrower(steps, weights):
        if way.get("gradients_at_once") and config.clip and config.clip_by == "norm":
            way |= {"clip_by": "last_norm"}
        given = {f"--{name.replace('_', '-')}": value for name, value in way.items()}
        text = " ".join(option if value is True else f"{option} {value}" for option, value in given.items())
        yield text, dataclasses.replace(config, **way)


def _rows_text(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in rows.items() if size)


def _size(size: int) -> str:
    return str(_core.format_bytes(size))
