"""What does the pipeline cost on one device, against a plain PyTorch loop over the same model?

Both train the same MLP blocks with the same stages, microbatches, threads and SGD. The plain loop checkpoints each
stage but the last (non-reentrant), as the pipeline recomputes each stage but the fused one. They take turns in one
process, and the losses have to be the same bits. Above 1, the pipeline is faster: an asynchronous step runs beside
the next forward. It is expected to reach 0.95 for layers of 5 ms and more; smaller layers show what a layer costs.

A virtual device shares the host's memory and cores, so its copies of weights and gradients take compute time, about
five passes over the weights a step. The second table shows how they weigh less the more rows use a weight per upload.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from support.report import Report, parser
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe

MICROBATCHES = 4
RATE = 0.01


class Block(nn.Module):
    """A residual MLP block over [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(nn.functional.gelu(self.up(self.norm(value))))


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().mean()


def build(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(layers)])


def forward_ms(width: int, rows: int) -> float:
    """How long one block's forward takes, with grad mode on."""
    block = Block(width)
    value = torch.randn(rows, width)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        block(value)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def width_for(wanted_ms: float, rows: int) -> int:
    """The width of a block whose forward takes about that long."""
    width = 32
    while width < 4096 and forward_ms(width, rows) < wanted_ms:
        width = max(width + 16, width * 5 // 4 // 16 * 16)
    return width


class Plain:
    """The plain loop. `stale` makes it read weights one step old, as asynchronous steps do."""

    def __init__(self, model: nn.Sequential, stages: list[range], stale: bool) -> None:
        self._stages = [nn.Sequential(*[model[layer] for layer in stage]) for stage in stages]
        self._parameters = list(model.parameters())
        self._stale = stale
        self._next: list[torch.Tensor] | None = None
        self._optimizer = torch.optim.SGD(self._parameters, lr=RATE)

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = []
        for value, part in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for stage in self._stages[:-1]:
                value = checkpoint(stage, value, use_reentrant=False)
            loss = loss_fn(self._stages[-1](value), part)
            loss.backward()
            losses.append(loss.detach())
        self._update()
        return sum(losses[1:], losses[0])

    def _update(self) -> None:
        if not self._stale:
            self._optimizer.step()
            self._optimizer.zero_grad()
            return
        # The pipeline shows the update of one step when the next is made.
        with torch.no_grad():
            shown = [parameter.clone() for parameter in self._parameters] if self._next is None else self._next
            if self._next is not None:
                for parameter, value in zip(self._parameters, self._next, strict=True):
                    parameter.copy_(value)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self._next = [parameter.clone() for parameter in self._parameters]
            for parameter, value in zip(self._parameters, shown, strict=True):
                parameter.copy_(value)


class Piped:
    """The pipeline on one virtual device."""

    def __init__(self, model: nn.Sequential, stages: list[range], is_async: bool) -> None:
        plan = roundpipe.ModelExecutePlan()
        plan.fwd_plan = stages[:-1]
        plan.bwd_plan = stages[::-1]
        config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
        self._model = roundpipe.RoundPipe(model, model_run_config=config)
        self._optimizer = torch.optim.SGD(self._model.optim_parameters(), lr=RATE)
        self._is_async = is_async

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._model.forward_backward(input_args=(batch,), label=target, loss_fn=loss_fn)
        self._model.step(self._update, is_async=self._is_async)
        return loss

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        self._model.synchronize()


def turn(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], batches: list, finish: Callable[[], None]
) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    for batch, target in batches:
        step(batch, target)
    finish()
    return (time.perf_counter() - start) * 1e3 / len(batches)


def compare(wanted_ms: float, rows: int, layers: int, rounds: int) -> list[str]:
    width = width_for(wanted_ms, rows)
    stages = [range(first, first + 2) for first in range(0, layers, 2)]
    torch.manual_seed(1)
    batches = [
        (torch.randn(MICROBATCHES * rows, width), torch.randn(MICROBATCHES * rows, width))
        for _ in range(max(2, min(20, int(300 / (wanted_ms * layers * MICROBATCHES)))))
    ]
    plain = Plain(build(layers, width), stages, stale=False)
    stale = Plain(build(layers, width), stages, stale=True)
    synchronous = Piped(build(layers, width), stages, is_async=False)
    asynchronous = Piped(build(layers, width), stages, is_async=True)
    for batch, target in batches[:3] * 2:  # warm-up and check
        expected, got = plain.step(batch, target), synchronous.step(batch, target)
        if not torch.equal(expected, got):
            raise SystemExit(f"the losses differ: plain {expected.item()!r}, pipeline {got.item()!r}")
        expected, got = stale.step(batch, target), asynchronous.step(batch, target)
        if not torch.equal(expected, got):
            raise SystemExit(f"the asynchronous losses differ: plain {expected.item()!r}, pipeline {got.item()!r}")
    times: dict[str, list[float]] = {"plain": [], "synchronous": [], "asynchronous": []}
    for _ in range(rounds):
        times["plain"].append(turn(plain.step, batches, lambda: None))
        times["synchronous"].append(turn(synchronous.step, batches, synchronous.synchronize))
        times["plain"].append(turn(plain.step, batches, lambda: None))
        times["asynchronous"].append(turn(asynchronous.step, batches, asynchronous.synchronize))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows_per_s = MICROBATCHES * rows / medians["plain"] * 1e3
    return [
        f"{forward_ms(width, rows):.2f}",
        str(rows),
        str(width),
        f"{medians['plain']:.1f}",
        f"{rows_per_s:,.0f}",
        f"{medians['plain'] / medians['synchronous']:.3f}",
        f"{medians['plain'] / medians['asynchronous']:.3f}",
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layer-ms", type=float, nargs="+", default=[0.5, 1, 2, 5, 10, 20])
    arguments.add_argument("--rows", type=int, default=1024, help="of a microbatch")
    arguments.add_argument("--fewer-rows", type=int, nargs="*", default=[64, 256], help="for the second table")
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, help="of torch; default: its own choice")
    options = arguments.parse_args()
    if options.quick:
        options.layer_ms, options.rows, options.fewer_rows, options.layers, options.rounds = [0.1], 64, [32], 4, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    roundpipe.devices("virtual:1")
    report = Report("Overhead: the pipeline on one device against a plain PyTorch loop", options.out)
    report(
        f"{options.layers} MLP blocks in stages of two, {MICROBATCHES} microbatches, SGD; medians of "
        f"{options.rounds} turns (plain: {2 * options.rounds}). Ratios are samples/s of the pipeline over the plain "
        "loop's. All losses are the plain loop's bits."
    )
    report("")
    header = ["layer forward ms", "rows", "width", "plain step ms", "plain rows/s"]
    header += ["synchronous ratio", "asynchronous ratio"]
    report.table(header, [compare(wanted, options.rows, options.layers, options.rounds) for wanted in options.layer_ms])
    report("")
    report("Fewer rows per uploaded weight, layers of about the longest of these times but one:")
    report("")
    wanted = sorted(options.layer_ms)[-2:][0]
    report.table(header, [compare(wanted, rows, options.layers, options.rounds) for rows in options.fewer_rows])
    report.close()


if __name__ == "__main__":
    main()
