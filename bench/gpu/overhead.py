"""Does the pipeline on one accelerator keep up with a plain PyTorch loop that has the weights on the card?

The plain loop holds all weights on the card and checkpoints every layer, so it recomputes as much as the pipeline.
The pipeline's weights stay on the host and travel twice a step. Both run in one process, in turn, over the same
batches; the losses are compared. No optimizer runs: this is about the devices.

    python bench/gpu/overhead.py [--device cuda:0] [--width 4096] [--layers 16] [--rows 2048 8192 32768]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from support.accelerator import default_device, describe, synchronize
from support.report import Report, parser
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig


class Block(nn.Module):
    """A residual MLP block over [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(nn.functional.gelu(self.up(self.norm(value))))


def build(layers: int, width: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(layers)]).to(dtype)


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).float().square().mean()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", help="default: the first accelerator, else virtual:1")
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--rows", type=int, nargs="+", default=[2048, 8192, 32768], help="rows a microbatch")
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.quick:
        options.width, options.layers, options.rows, options.microbatches, options.rounds = 64, 4, [16], 2, 1

    spec = options.device or default_device("virtual:1")
    pool = roundpipe.devices(spec)
    device = torch.device(pool.torch_devices[0])
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    report = Report("Overhead: the pipeline on one card against a plain loop with the weights on the card", options.out)
    report(f"- {describe(spec)}")
    report("")
    report(
        f"{options.layers} layers of width {options.width}, {dtype}, {options.microbatches} microbatches, medians of "
        f"{options.rounds} rounds in which both take turns."
    )
    report("")
    lines = []

    plain = build(options.layers, options.width, dtype).to(device)
    model = RoundPipe(
        build(options.layers, options.width, dtype),
        model_run_config=RoundPipeRunConfig(num_microbatch=options.microbatches, recompute_grain="stage"),
    )
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(options.layers - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(options.layers))]
    config = RoundPipeRunConfig(execute_plan=plan)

    for rows in options.rows:
        torch.manual_seed(1)
        inputs = torch.randn(rows * options.microbatches, options.width, dtype=dtype)
        target = torch.zeros_like(inputs)

        def run_plain(inputs: torch.Tensor = inputs, target: torch.Tensor = target) -> float:
            total = 0.0
            plain.zero_grad()
            parts = zip(inputs.chunk(options.microbatches), target.chunk(options.microbatches), strict=True)
            for x, y in parts:
                hidden = x.to(device, non_blocking=True)
                for layer in plain:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
                loss = loss_fn(hidden, y.to(device, non_blocking=True))
                loss.backward()
                total += float(loss)
            return total

        def run_pipeline(inputs: torch.Tensor = inputs, target: torch.Tensor = target) -> float:
            model.zero_grad()
            loss = model.forward_backward((inputs,), label=target, loss_fn=loss_fn, run_config=config)
            model.synchronize()
            return float(loss)

        times: dict[str, list[float]] = {"plain": [], "pipeline": []}
        peaks: dict[str, float] = {}
        losses: dict[str, float] = {}
        for round_number in range(options.rounds + 1):
            for side, run in (("plain", run_plain), ("pipeline", run_pipeline)):
                synchronize()
                if device.type != "cpu":
                    torch.accelerator.reset_peak_memory_stats()
                start = time.perf_counter()
                losses[side] = run()
                synchronize()
                if round_number > 0:
                    times[side].append(time.perf_counter() - start)
                if device.type != "cpu":
                    peaks[side] = torch.accelerator.max_memory_allocated() / 1e9
        if abs(losses["plain"] - losses["pipeline"]) > 1e-2 * abs(losses["plain"]):
            raise SystemExit(f"the losses differ: {losses}")
        with torch.no_grad():
            value = inputs.chunk(options.microbatches)[0].to(device)
            plain[0](value)
            synchronize()
            start = time.perf_counter()
            for _ in range(5):
                plain[0](value)
            synchronize()
            layer_ms = (time.perf_counter() - start) / 5 * 1e3
        total_rows = rows * options.microbatches
        rates = {side: total_rows / statistics.median(values) for side, values in times.items()}
        lines.append(
            [
                f"{rows:,}",
                f"{layer_ms:.2f}",
                f"{rates['plain']:,.0f}",
                f"{rates['pipeline']:,.0f}",
                f"{rates['pipeline'] / rates['plain']:.3f}",
                f"{peaks.get('plain', 0):.2f}",
                f"{peaks.get('pipeline', 0):.2f}",
            ]
        )
    header = ["rows a microbatch", "layer ms", "plain rows/s", "pipeline rows/s", "ratio"]
    report.table([*header, "peak plain GB", "peak pipeline GB"], lines)
    report.close()


if __name__ == "__main__":
    main()
