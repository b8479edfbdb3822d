"""Does the demo's model learn as well with 16-bit weights, 8-bit moments and asynchronous steps as in plain fp32?

Each row trains the demo's model from the same weights on the same batches. Weights of bf16 with the 16 bits that make
them fp32 are compared with fp32 weights; 8-bit moments and asynchronous steps with the row that differs in nothing
else; and bf16 weights without the remainder, stepped by torch's AdamW, show what would be lost. The held-out loss is
that of the demo, after the last step. Asynchronous rows begin as the demo does, with a share of synchronous steps. The
program fails when a held-out loss is further off than stated.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from support.demo_runs import DemoRuns, Losses
from support.report import Report, parser

import roundpipe
from roundpipe.demo.model import as_layers, build_llama
from roundpipe.demo.options import FULL, VIRTUAL_DEVICES, DemoOptions
from roundpipe.demo.training import (
    FusedSteps,
    RandomBatches,
    StepRecord,
    held_out_batches,
    learning_rate_factor,
    token_tables,
    train,
)

MakeStep = Callable[[roundpipe.RoundPipe, list[str], DemoOptions], Callable[[], None]]


def plain_bf16(model: roundpipe.RoundPipe, tables: list[str], options: DemoOptions) -> Callable[[], None]:
    """torch's AdamW over bf16 parameters: weights and moments are rounded to bf16 in each step."""
    named = dict(model.optim_named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if name not in tables]},
            {"params": [named[name] for name in tables], "lr": options.learning_rate * options.token_table_factor},
        ],
        lr=options.learning_rate,
        betas=options.betas,
        weight_decay=options.weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(list(named.values()), options.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    synchronous_steps, made = round(options.steps * options.synchronous_share), itertools.count()
    return lambda: model.step(update, is_async=next(made) >= synchronous_steps)


# Name: weights, step, and the row to compare with and how far off the held-out loss may be.
CASES: dict[str, tuple[torch.dtype, MakeStep, tuple[str, float] | None]] = {
    "fp32, synchronous": (torch.float32, lambda m, t, o: FusedSteps(m, t, o, is_async=False), None),
    "bf16 + remainder, synchronous": (
        torch.bfloat16,
        lambda m, t, o: FusedSteps(m, t, o, is_async=False),
        ("fp32, synchronous", 0.005),
    ),
    "bf16 + remainder, asynchronous": (torch.bfloat16, FusedSteps, ("bf16 + remainder, synchronous", 0.01)),
    "bf16 + remainder, 8-bit moments, asynchronous": (
        torch.bfloat16,
        lambda m, t, o: FusedSteps(m, t, o, moments="8bit"),
        ("bf16 + remainder, asynchronous", 0.01),
    ),
    "plain bf16, asynchronous": (torch.bfloat16, plain_bf16, None),
}


class FiniteLosses(Losses):
    """Ends the program at a loss that is NaN."""

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        if math.isnan(record.loss):
            raise SystemExit(f"the loss of step {record.step} is NaN")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=FULL.steps)
    chosen = arguments.parse_args()
    report = Report("Convergence of the demo's model", chosen.out)
    roundpipe.devices(VIRTUAL_DEVICES)
    runs = DemoRuns.prepare(replace(FULL, steps=chosen.steps, evaluations=0), chosen.quick)
    options = runs.options
    report(f"{runs}.")
    report("")
    rows, losses, failed = [], {}, []
    for name, (dtype, make, compared) in CASES.items():
        llama = build_llama(runs.vocabulary, options.sequence_length, options.seed, dtype)
        layers = as_layers(llama)
        model = roundpipe.RoundPipe(layers, name="demo")
        seen = FiniteLosses()
        batches, kept_out = RandomBatches(runs.training, options), held_out_batches(runs.held_out, options)
        train(model, make(model, token_tables(layers), options), batches, kept_out, options, seen)
        losses[name] = seen.held_out
        row = [name, f"{seen.held_out:.4f}", f"{seen.seconds:.0f}", "", "", ""]
        if compared is not None:
            other, bound = compared
            off = seen.held_out / losses[other] - 1
            row[3:] = [other, f"{100 * off:+.2f} %", f"{100 * bound:.1f} %"]
            if abs(off) > bound and not chosen.quick:
                failed.append(name)
        rows.append(row)
        print(" | ".join(row), file=sys.stderr, flush=True)
    report.table(["weights and steps", "held-out loss", "seconds", "compared with", "off by", "allowed"], rows)
    report.close()
    if failed:
        raise SystemExit("further off than allowed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
