"""How much of the link to the card does the pipeline use, and how long does the card wait for it?

The limit is a plain page-locked `copy_` of the same size as a layer, again and again, in one direction and in both at
once. Against it the bytes that the pipeline uploaded and downloaded, over the time it took: in a forward of few rows,
where a layer's weights take longer to come than to be used, so the link is what is measured; in training of few rows;
and in training of many rows, where the link should not be noticed. "device waits" is the part of the time, from the
first job's begin to the last one's end, in which no job ran; jobs that wait for a gradient count as waiting. Outputs
are compared with those of the plain model on the card.

    python bench/gpu/link.py [--width 8192] [--layers 24]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.accelerator import default_device, describe, synchronize
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _core


def copy_limit_gb_per_s(size_bytes: int, device: torch.device, direction: str, rounds: int) -> float:
    """Of plain copies between page-locked memory and the card; of both directions together for "both"."""
    pinned = device.type != "cpu"
    host = [torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    card = [torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)] if pinned else [None, None]
    sides = {"up": [(card[0], host[0])], "down": [(host[1], card[1])]}
    pairs = sides["up"] + sides["down"] if direction == "both" else sides[direction]
    rates = []
    for _ in range(rounds + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(8):
            for (target, source), stream in zip(pairs, streams, strict=False):
                if stream is None:
                    target.copy_(source)
                else:
                    with stream:
                        target.copy_(source, non_blocking=True)
        synchronize()
        rates.append(8 * len(pairs) * size_bytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates[1:])


def waiting_share(records: Sequence[_core.Record]) -> float:
    """Which part of the time the devices ran no job, or one that waited; the mean over the devices."""
    spans: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for record in records:
        spans[record.device].append((record.start_ms, record.end_ms, record.waited_ms))
    shares = []
    for jobs in spans.values():
        jobs.sort()
        busy_ms, reached_ms = 0.0, jobs[0][0]
        for start_ms, end_ms, waited_ms in jobs:
            busy_ms += max(0.0, end_ms - max(start_ms, reached_ms) - waited_ms)
            reached_ms = max(reached_ms, end_ms)
        shares.append(1 - busy_ms / (reached_ms - jobs[0][0]))
    return statistics.mean(shares)


def measure(
    pool: roundpipe.DevicePool, run: Callable[[], Sequence[_core.Record]], rounds: int
) -> tuple[float, float, float, float]:
    """Milliseconds of a run, GB/s up and down, and the waiting share; medians after one run that warms up."""
    figures = []
    for _ in range(rounds + 1):
        before = pool.transfer_report()
        start = time.perf_counter()
        records = run()
        seconds = time.perf_counter() - start
        moved = [
            sum(now[key] - then[key] for now, then in zip(pool.transfer_report(), before, strict=True)) / seconds / 1e9
            for key in ("uploaded_bytes", "downloaded_bytes")
        ]
        figures.append((seconds * 1e3, *moved, waiting_share(records)))
    return tuple(statistics.median(column) for column in zip(*figures[1:], strict=True))  # type: ignore[return-value]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", help="default: the first accelerator, else virtual:1")
    arguments.add_argument("--width", type=int, default=8192)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--few-rows", type=int, default=64, help="of a microbatch")
    arguments.add_argument("--many-rows", type=int, default=16384, help="of a microbatch")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.quick:
        options.width, options.layers, options.few_rows, options.many_rows, options.rounds = 128, 4, 4, 256, 1

    spec = options.device or default_device("virtual:1")
    pool = roundpipe.devices(spec)
    device = torch.device(pool.torch_devices[0])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layer_bytes = options.width**2 * dtype.itemsize
    limits = {d: copy_limit_gb_per_s(layer_bytes, device, d, options.rounds) for d in ("up", "down", "both")}

    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)])
    plain.to(dtype)
    inputs = torch.randn(options.few_rows, options.width, dtype=dtype)
    with torch.no_grad():
        value = inputs.to(device)
        for layer in plain:  # one at a time on the card
            value = nn.functional.linear(value, layer.weight.to(device))
        expected = value.cpu()
    model = RoundPipe(plain, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    with torch.no_grad():
        got = model(inputs)
    if not torch.equal(got, expected):
        raise SystemExit(f"the outputs differ by {(got - expected).abs().max().item()!r}")

    def forward() -> Sequence[_core.Record]:
        with torch.no_grad():
            model(inputs)
        model.synchronize()
        return model._pipeline.last_records()

    def training(rows: int) -> Callable[[], Sequence[_core.Record]]:
        batch = torch.randn(2 * rows, options.width, dtype=dtype)
        config = RoundPipeRunConfig(num_microbatch=2)

        def run() -> Sequence[_core.Record]:
            pending = model.submit((batch,), loss_fn=lambda out, _: out.float().square().mean(), run_config=config)
            loss = pending.loss()
            model.synchronize()
            if not loss.isfinite():
                raise SystemExit(f"the loss is {loss.item()}")
            model.zero_grad()
            return pending._submitted.records()

        return run

    report = Report("Link: bandwidth reached against plain copies, and how long the card waits", options.out)
    report(f"- {describe(spec)}")
    report("")
    report(
        f"{options.layers} layers of {layer_bytes / 1e6:,.1f} MB, {dtype}, medians of {options.rounds} rounds. Plain "
        f"copies of a layer's size: up {limits['up']:.2f}, down {limits['down']:.2f}, both together "
        f"{limits['both']:.2f} GB/s. No optimizer runs. The forward's outputs are the plain model's bits."
    )
    report("")
    rows = []
    for name, run in (
        (f"forward, {options.few_rows:,} rows", forward),
        (f"training, 2 x {options.few_rows:,} rows", training(options.few_rows)),
        (f"training, 2 x {options.many_rows:,} rows", training(options.many_rows)),
    ):
        milliseconds, up, down, waiting = measure(pool, run, options.rounds)
        limit = limits["both"] if down > 0.1 * up else limits["up"]
        rows.append([name, f"{milliseconds:.1f}", f"{up:.2f}", f"{down:.2f}", f"{(up + down) / limit:.3f}"])
        rows[-1].append(f"{waiting:.1%}")
    report.table(["", "ms", "up GB/s", "down GB/s", "of the limit", "device waits"], rows)
    report.close()


if __name__ == "__main__":
    main()
