"""What does it cost the caller to submit a batch, by layers and microbatches?

The first layer waits at a gate while `submit` is timed, so nothing that it makes is complete yet: the most that a call
can have pending at once. Every layer is a stage, which gives the most jobs. After the gate has opened, the loss has to
be that of a plain loop, to the bit. Submission is linear when the time for each layer and microbatch does not grow.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch
from support.report import Report, parser
from torch import nn

import roundpipe

WIDTH = 4


class Gate(nn.Module):
    """Hands its input on once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.opened.wait()
        return self.inner(value)


def loss_fn(outputs: torch.Tensor, _: None) -> torch.Tensor:
    return outputs.square().sum()


def plain_loss(layers: nn.Sequential, batch: torch.Tensor, microbatches: int) -> torch.Tensor:
    with torch.no_grad():
        losses = [loss_fn(layers(part), None) for part in batch.tensor_split(microbatches)]
    return sum(losses[1:], losses[0])


def measure(layers: int, microbatches: int, rounds: int) -> float:
    """Milliseconds that the caller spends in `submit`; the median."""
    torch.manual_seed(0)
    gate = Gate()
    chain = nn.Sequential(gate, *[nn.Linear(WIDTH, WIDTH) for _ in range(layers - 1)])
    plan = roundpipe.ModelExecutePlan()
    stages = [range(layer, layer + 1) for layer in range(layers)]
    plan.fwd_plan, plan.bwd_plan = stages[:-1], stages[::-1]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
    batch = torch.randn(microbatches, WIDTH)
    gate.opened.set()
    expected = plain_loss(chain, batch, microbatches)
    model = roundpipe.RoundPipe(chain, model_run_config=config)
    times = []
    for _ in range(rounds + 1):
        gate.opened.clear()
        start = time.perf_counter()
        pending = model.submit((batch,), loss_fn=loss_fn)
        times.append((time.perf_counter() - start) * 1e3)
        gate.opened.set()
        if not torch.equal(pending.loss(), expected):
            raise SystemExit("[submission] the loss is not the plain loop's")
        model.synchronize()
    return statistics.median(times[1:])  # the first one also plans


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, nargs="+", default=[12, 24, 47, 94])
    arguments.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64])
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.quick:
        options.layers, options.microbatches, options.rounds = [4, 8], [2, 4], 1
    roundpipe.devices("virtual:2")
    report = Report("Submission: what a call costs before anything of it has run", options.out)
    report(f"Every layer is a stage; medians of {options.rounds}. All losses are the plain loop's bits.")
    report("")
    rows = []
    for layers in options.layers:
        for microbatches in options.microbatches:
            ms = measure(layers, microbatches, options.rounds)
            rows.append([str(layers), str(microbatches), f"{ms:.1f}", f"{ms * 1e3 / layers / microbatches:.1f}"])
    report.table(["layers", "microbatches", "submit ms", "us a layer and microbatch"], rows)
    report.close()


if __name__ == "__main__":
    main()
