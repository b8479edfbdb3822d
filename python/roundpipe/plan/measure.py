"""Measures the pool's devices, their links and the host, with the engine's own transfers and optimizer."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from roundpipe import RoundPipe, RoundPipeRunConfig, _core, optim
from roundpipe.device.pool import DevicePool
from roundpipe.model.memory.budget import UpdateRule
from roundpipe.plan.cards import Card
from roundpipe.plan.machine import Machine

_LAYERS = 4
# Of a device's memory, so that the weights of two layers, gradients and values fit beside each other.
_SHARE_OF_MEMORY = 12
_ROWS = 512  # of the batch that compares the devices' speed, at most
_BATCH_S = 0.2
_DTYPE = torch.bfloat16
# Kinds of products that the card is measured for.
PRODUCT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LAUNCHES = 200
_HEADS, _HEAD_WIDTH = 16, 128
_LONG_ENOUGH_S = 1e-3  # of one call that is measured
# Speeds closer than this are the same: a second measurement differs as much.
_SAME_SPEED = 0.05
_CALLS_TOGETHER = 3
# The host limits the links only if all together are slower than this share of what they reach one by one.
_LINKS_SHARE = 0.9


def measure(
    pool: DevicePool, rounds: int = 3, say: Callable[[str], None] = lambda _: None, layer_bytes: int = 32_000_000
) -> Machine:
    """Measures the machine, in some seconds for each device. Nothing else should use it meanwhile.

    A link's bandwidth is what weights (up) and gradients (down) of one device reach while the other devices rest. The
    optimizer is `AdamW` on bf16 weights with fp32 masters, while the links rest. The host's bandwidth is the least that
    all links reach together, or uploads and updates do, in bytes of the host's memory; 0, no limit, if each is about
    the sum of what its parts reach alone. Speeds are relative to the fastest device.

    Args:
        rounds: measurements of each figure, of which the median counts, after one that warms up.
        say: called with what is measured next.
        layer_bytes: of weights that move at once; less if a device's memory is small.
    """
    devices = range(len(pool))
    models = [_model(pool, device, layer_bytes) for device in devices]
    batch = _rows_of_a_batch(pool, models[0])
    up, down, ms = [], [], []
    for device in devices:
        say(f"device {device}: link and speed")
        figures = [_alone(pool, models[device], device, batch) for _ in range(rounds + 1)][1:]
        up.append(statistics.median(figure[0] for figure in figures))
        down.append(statistics.median(figure[1] for figure in figures))
        ms.append(statistics.median(figure[2] for figure in figures))
    say("all links together")
    limits = _limits_of_links(pool, models, rounds, sum(up), sum(up) + sum(down))
    say("optimizer")
    update = statistics.median(_updates(pool, models[0], rounds + 1)[1:])
    say("optimizer and links together")
    limits += _limits_beside_updates(pool, models, rounds, layer_bytes, sum(up), update)
    host = min(limits, default=0.0)
    say("card")
    fastest = min(devices, key=lambda device: ms[device])
    card = measure_card(torch.device(pool.torch_devices[fastest]), rounds)
    alike = max(ms) <= (1 + _SAME_SPEED) * min(ms)
    speeds = [1.0 if alike else round(min(ms) / own, 3) for own in ms]
    memory = [_memory_bytes(pool, device) for device in devices]
    return Machine(
        name=", ".join(dict.fromkeys(pool)),
        devices=list(zip(speeds, memory, strict=True)),
        rates={
            # The planner knows one bandwidth for all links: a plan must not count on more than the slowest has.
            "link_up_gb_per_s": round(min(up), 2),
            "link_down_gb_per_s": round(min(down), 2),
            "host_gb_per_s": round(host, 2),
        },
        update_gb_per_s=round(update, 2),
        card=card,
    )


def measure_card(device: torch.device, rounds: int = 3) -> Card:
    """What a device reaches by itself, the median of `rounds` figures of each kind, after one that warms up.

    Products are square, attention is causal over a row, in bf16 or in fp32 if products in fp32 are faster, an addition
    reads two tensors and writes one, and launches are additions to a single element. Sizes double until one call takes
    a millisecond, up to 8,192 (additions: 0.5 GB a tensor), so that a slow device is not asked for minutes.
    """

    def multiply(dtype: torch.dtype) -> Callable[[], float]:
        size = _long_enough(device, 256, 8192, lambda size: _product(device, dtype, size))
        return lambda: matmul_gflops(device, dtype, size) / 1000

    def attend(row: int) -> Callable[[], object]:
        query = torch.ones(1, _HEADS, row, _HEAD_WIDTH, device=device, dtype=attended)
        return lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)

    def add(count: int) -> Callable[[], object]:
        left, right, total = (torch.ones(count, device=device, dtype=_DTYPE) for _ in range(3))
        return lambda: torch.add(left, right, out=total)

    products = {name: _median(rounds, multiply(dtype)) for name, dtype in PRODUCT_DTYPES.items()}
    attended = torch.bfloat16 if products["bf16"] >= products["fp32"] else torch.float32
    row = _long_enough(device, 256, 8192, attend)
    operations = 2 * _HEADS * row * row * _HEAD_WIDTH  # two products, of which a causal mask leaves half
    attending = attend(row)
    attention = _median(rounds, lambda: operations / 1e12 / _seconds(device, attending))
    count = _long_enough(device, 1 << 22, 1 << 28, add)
    adding = add(count)
    memory = _median(rounds, lambda: 3 * count * _DTYPE.itemsize / 1e9 / _seconds(device, adding))
    one = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1)

    launches = _median(rounds, lambda: _seconds(device, launch) * 1e6 / _LAUNCHES)
    return Card(products, attention, memory, launches)


def _long_enough(device: torch.device, size: int, most: int, of_size: Callable[[int], Callable[[], object]]) -> int:
    while size < most and _seconds(device, of_size(size), least_s=0.0) < _LONG_ENOUGH_S:
        size *= 2
    return size


def _median(rounds: int, figure: Callable[[], float]) -> float:
    return float(f"{statistics.median([figure() for _ in range(rounds + 1)][1:]):.4g}")


def _seconds(device: torch.device, work: Callable[[], object], least_s: float = 0.05) -> float:
    """The time of one call, over as many as take some milliseconds together."""

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    work()
    finish()
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < least_s:
        work()
        finish()
        count += 1
    return (time.perf_counter() - start) / count


def matmul_gflops(device: torch.device, dtype: torch.dtype, size: int = 512, least_s: float = 0.1) -> float:
    """The speed of matrix products on a device, in 1e9 operations per second."""
    return 2 * size**3 / _seconds(device, _product(device, dtype, size), least_s) / 1e9


def _product(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[], object]:
    matrix = torch.ones(size, size, device=device).to(dtype)
    return lambda: matrix @ matrix


def _memory_bytes(pool: DevicePool, device: int) -> int:
    """What the planner may use: a device's cap, else what a card says that it has free; else 0, no limit."""
    limit = int(pool.memory_report()[device]["limit_bytes"])
    on = torch.device(pool.torch_devices[device])
    if limit or on.type == "cpu":
        return limit
    free_and_total = getattr(torch.get_device_module(on), "mem_get_info", None)
    return int(free_and_total(on)[0]) if free_and_total is not None else 0


def _model(pool: DevicePool, device: int, layer_bytes: int) -> RoundPipe:
    """Layers that run on one device, each in a stage of its own."""
    memory = _memory_bytes(pool, device)
    if memory:
        layer_bytes = min(layer_bytes, memory // _SHARE_OF_MEMORY)
    width = max(16, int((layer_bytes / _DTYPE.itemsize) ** 0.5) // 16 * 16)
    layers = [nn.Linear(width, width, bias=False, dtype=_DTYPE) for _ in range(_LAYERS)]
    return RoundPipe(nn.Sequential(*layers), name=f"meter of device {device}")


def _config(pool: DevicePool, device: int, mode: str) -> RoundPipeRunConfig:
    last = _LAYERS - 1
    stages = [("forward", layer) for layer in range(_LAYERS)]
    if mode == "fused":
        stages = [*stages[:last], ("fused", last), *(("backward", layer) for layer in reversed(range(last)))]
    jobs = [(phase, at, at + 1, 0, 1, device, place / len(stages)) for place, (phase, at) in enumerate(stages)]
    return RoundPipeRunConfig(num_microbatch=1, execute_plan=_core.Plan(_LAYERS, 1, len(pool), 0, jobs))


def _batch(model: RoundPipe, rows: int) -> torch.Tensor:
    width = next(iter(model.parameters())).shape[1]
    return torch.full((rows, width), 0.01, dtype=_DTYPE)


def _train(pool: DevicePool, model: RoundPipe, device: int, rows: int) -> None:
    model.forward_backward(
        (_batch(model, rows),),
        loss_fn=lambda outputs, _: outputs.float().square().mean(),
        run_config=_config(pool, device, "fused"),
    )
    model.synchronize()


def _predict(pool: DevicePool, model: RoundPipe, device: int, rows: int) -> None:
    with torch.no_grad():
        model(_batch(model, rows), roundpipe_run_config=_config(pool, device, "forward"))
    model.synchronize()


def _rows_of_a_batch(pool: DevicePool, model: RoundPipe) -> int:
    """So many that a batch takes some time, and no more: processors without products in bf16 would take minutes."""
    rows, took_s = 1, 0.0
    while rows < _ROWS and took_s < _BATCH_S:
        rows *= 2
        _train(pool, model, 0, rows)  # a card loads its kernels for it
        start = time.perf_counter()
        _train(pool, model, 0, rows)
        took_s = time.perf_counter() - start
    return rows


def _alone(pool: DevicePool, model: RoundPipe, device: int, rows: int) -> tuple[float, float, float]:
    """GB/s up and down while one device works, and its milliseconds for a batch of many rows."""
    before = pool.transfer_report()[device]
    _predict(pool, model, device, 1)
    between = pool.transfer_report()[device]
    _train(pool, model, device, 1)
    after = pool.transfer_report()[device]
    _train(pool, model, device, rows)
    ms = sum(end_ms - start_ms for *_, start_ms, end_ms in model.last_records())
    return _gb_per_s(before, between, "up"), _gb_per_s(between, after, "down"), ms


def _limits_of_links(
    pool: DevicePool, models: list[RoundPipe], rounds: int, up_gb_per_s: float, both_gb_per_s: float
) -> list[float]:
    """What all links reach together in uploads and in training, of those that are less than the links' sum."""
    limits = []
    for work, alone in ((_predict, up_gb_per_s), (_train, both_gb_per_s)):
        reached = statistics.median([_together(pool, models, work) for _ in range(rounds + 1)][1:])
        if reached < _LINKS_SHARE * alone:
            limits.append(reached)
    return limits


def _limits_beside_updates(
    pool: DevicePool, models: list[RoundPipe], rounds: int, layer_bytes: int, up_gb_per_s: float, update_gb_per_s: float
) -> list[float]:
    """What uploads to all devices and updates move in the host's memory together, if that is less than their sum."""
    traffic = UpdateRule("adamw").traffic(_DTYPE)
    updated = _model(pool, 0, layer_bytes)
    over = threading.Event()
    links: list[float] = []

    def upload(model: RoundPipe, device: int) -> None:
        while not over.is_set():
            _predict(pool, model, device, 1)

    def watched(update: Callable[[], None]) -> None:
        before = pool.transfer_report()
        update()
        after = pool.transfer_report()
        links.append(sum(_gb_per_s(then, now, "up") for then, now in zip(before, after, strict=True)))

    threads = [threading.Thread(target=upload, args=(model, device)) for device, model in enumerate(models)]
    for thread in threads:
        thread.start()
    try:
        updates = _updates(pool, updated, rounds + 1, watched)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    # A short update may meet no upload that ends.
    reached = [link + traffic * rate for link, rate in list(zip(links, updates, strict=True))[1:] if link]
    alone = up_gb_per_s + traffic * update_gb_per_s
    return [statistics.median(reached)] if reached and statistics.median(reached) < _LINKS_SHARE * alone else []


def _together(
    pool: DevicePool, models: list[RoundPipe], work: Callable[[DevicePool, RoundPipe, int, int], None]
) -> float:
    """GB/s of all links while all devices do the work, each some times."""
    before = pool.transfer_report()

    def repeat(model: RoundPipe, device: int) -> None:
        for _ in range(_CALLS_TOGETHER):
            work(pool, model, device, 1)

    threads = [threading.Thread(target=repeat, args=(model, device)) for device, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = pool.transfer_report()
    directions = ("up", "down") if work is _train else ("up",)
    return sum(
        _gb_per_s(then, now, direction) for then, now in zip(before, after, strict=True) for direction in directions
    )


def _gb_per_s(before: dict[str, Any], after: dict[str, Any], direction: str) -> float:
    """Of weights or parameter gradients, while they moved."""
    kind = {"up": "weights", "down": "parameter gradients"}[direction]
    moved = ms = 0.0
    for then, now in zip(before["classes"], after["classes"], strict=True):
        if (now["direction"], now["kind"]) == (direction, kind):
            moved += now["bytes"] - then["bytes"]
            ms += now["moving_ms"] - then["moving_ms"]
    return moved / (ms * 1e6) if ms > 0 else 0.0


def _updates(
    pool: DevicePool,
    model: RoundPipe,
    rounds: int,
    around: Callable[[Callable[[], None]], None] = lambda update: update(),
) -> list[float]:
    """GB of bf16 weights that the host's AdamW updates a second. `around` calls each update."""
    optimizer = optim.AdamW(model, lr=0.0)
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    rates = []

    def update() -> None:
        model.step(optimizer)
        model.synchronize()

    for _ in range(rounds):
        _train(pool, model, 0, 1)
        start = time.perf_counter()
        around(update)
        rates.append(weight_bytes / (time.perf_counter() - start) / 1e9)
    return rates
