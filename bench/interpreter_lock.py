"""How often does the engine take Python's interpreter lock, and what do several devices do with it?

Layers so small that almost all of their time is Python run through the real engine on 1 to 8 virtual devices, each of
which is a thread. "Plain threads" is the limit that Python sets: as many threads call the same layers in a plain loop,
each on microbatches of its own. Times the engine took the lock are counted where it does; what torch does with the lock
inside a layer, and what a thread that has it already takes again, is not in them. Layers of a stage run under one
taking, so the figures follow the plans, which are made from measured times. Outputs are the plain model's bits.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _core


class Small(nn.Module):
    """A residual layer over [rows, width], in a few calls of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.linear(value).relu()


def timed(run: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Seconds, and how often the engine took the lock; medians after one run that warms up."""
    figures = []
    for _ in range(rounds + 1):
        before = _core.interpreter_lock_acquisitions()
        start = time.perf_counter()
        run()
        figures.append((time.perf_counter() - start, _core.interpreter_lock_acquisitions() - before))
    seconds, taken = zip(*figures[1:], strict=True)
    return statistics.median(seconds), statistics.median(taken)


def plain_threads(chain: nn.Sequential, parts: tuple[torch.Tensor, ...], threads: int) -> None:
    """A forward of `parts`, divided among that many threads."""

    def work(first: int) -> None:
        with torch.no_grad():
            for part in parts[first::threads]:
                chain(part)

    started = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--width", type=int, default=16)
    arguments.add_argument("--microbatches", type=int, default=32)
    arguments.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    if options.quick:
        options.layers, options.microbatches, options.devices, options.rounds = 4, 4, [1, 2], 1

    torch.set_num_threads(1)
    torch.manual_seed(0)
    chain = nn.Sequential(*[Small(options.width) for _ in range(options.layers)])
    inputs = torch.randn(options.microbatches, options.width)
    with torch.no_grad():
        expected = torch.cat([chain(part) for part in inputs.split(1)])
    config = RoundPipeRunConfig(num_microbatch=options.microbatches)
    forwards = options.layers * options.microbatches

    report = Report("The interpreter lock: how often the engine takes it, and layer forwards a second", options.out)
    report(
        f"{options.layers} layers of width {options.width}, {options.microbatches} microbatches of a row, medians of "
        f"{options.rounds} rounds. A call makes {forwards:,} layer forwards; a training step makes them, recomputes "
        "those that were not fused with their backward, and runs no optimizer."
    )
    report("")
    rows = []
    for devices in options.devices:
        roundpipe.devices(f"virtual:{devices},threads=1")
        model = RoundPipe(chain, model_run_config=config)

        def forward(model: RoundPipe = model) -> None:
            with torch.no_grad():
                outputs = model(inputs)
            model.synchronize()
            if not torch.equal(outputs, expected):
                raise SystemExit(f"the outputs differ by {(outputs - expected).abs().max().item()!r}")

        def training(model: RoundPipe = model) -> None:
            model.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().sum())
            model.synchronize()
            model.zero_grad()

        seconds, taken = timed(forward, options.rounds)
        step_seconds, step_taken = timed(training, options.rounds)
        plain_seconds, _ = timed(lambda count=devices: plain_threads(chain, inputs.split(1), count), options.rounds)
        rows.append(
            [
                str(devices),
                f"{taken / forwards:.2f}",
                f"{step_taken / forwards:.2f}",
                f"{forwards / seconds:,.0f}",
                f"{forwards / plain_seconds:,.0f}",
                f"{plain_seconds / seconds:.3f}",
                f"{step_seconds * 1e3:.1f}",
            ]
        )
        del model, forward, training  # the chain is in one model at a time
    header = ["devices", "taken a layer forward", "in a training step", "layer forwards/s", "plain threads", "ratio"]
    report.table([*header, "training step ms"], rows)
    report.close()


if __name__ == "__main__":
    main()
