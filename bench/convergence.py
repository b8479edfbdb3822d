"""Does the demo's model learn as well with fewer bits of weights and moments and asynchronous steps as in plain fp32?

Each row trains the demo's model from the same weights on the same batches. Weights of bf16 with the 16 bits that make
them fp32 are compared with fp32 weights; masters of 24 bits, 8-bit moments and asynchronous steps with the row that
differs in nothing else; and bf16 weights without the remainder, stepped by torch's AdamW, show what would be lost. The
held-out loss is that after the last step. Asynchronous rows begin with a share of synchronous steps. The program fails
when a held-out loss is further off than stated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import torch
from support.demo_runs import CLIP_NORM, TABLES, DemoRuns
from support.report import Report, parser

import roundpipe
from roundpipe.model.step.fused_optimizer import Masters, Moments
from roundpipe.train.demo.preset import FULL_STEPS, VIRTUAL_DEVICES

RATE = 1.2e-4  # a rate that synchronous steps still tolerate costs asynchronous ones a tenth of their loss
SYNCHRONOUS_SHARE = 0.4  # of the steps, at the start: a staleness of one costs most there

MakeStep = Callable[[roundpipe.RoundPipe, DemoRuns], Callable[[int], None]]


def fused(is_async: bool, moments: Moments = "float32", masters: Masters = "float32") -> MakeStep:
    """The engine's AdamW; asynchronous steps begin after a share of synchronous ones."""

    def prepared(model: roundpipe.RoundPipe, runs: DemoRuns) -> Callable[[int], None]:
        optimizer = runs.adamw(model, moments, masters)
        schedule = runs.schedule(optimizer)
        synchronous = round(runs.steps * (SYNCHRONOUS_SHARE if is_async else 1))

        def make_step(step: int) -> None:
            model.step(optimizer, step >= synchronous, max_grad_norm=CLIP_NORM, lr_scheduler=schedule)

        return make_step

    return prepared


def plain_bf16(model: roundpipe.RoundPipe, runs: DemoRuns) -> Callable[[int], None]:
    """torch's AdamW over bf16 parameters: weights and moments are rounded to bf16 in each step."""
    named = dict(model.optim_named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for name, parameter in named.items() if name not in TABLES]},
            *({"params": [named[name]], "lr": runs.rate * factor} for name, factor in TABLES.items()),
        ],
        **runs.rule,
    )
    schedule = runs.schedule(optimizer)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return lambda step: model.step(update, is_async=step >= round(runs.steps * SYNCHRONOUS_SHARE))


# Name: weights, step, and the row to compare with and how far off the held-out loss may be.
CASES: dict[str, tuple[torch.dtype, MakeStep, tuple[str, float] | None]] = {
    "fp32, synchronous": (torch.float32, fused(is_async=False), None),
    "bf16 + remainder, synchronous": (torch.bfloat16, fused(is_async=False), ("fp32, synchronous", 0.005)),
    "bf16 + remainder, asynchronous": (
        torch.bfloat16,
        fused(is_async=True),
        ("bf16 + remainder, synchronous", 0.01),
    ),
    "bf16 + remainder, 8-bit moments, asynchronous": (
        torch.bfloat16,
        fused(is_async=True, moments="8bit"),
        ("bf16 + remainder, asynchronous", 0.01),
    ),
    "bf16, 24-bit masters, synchronous": (
        torch.bfloat16,
        fused(is_async=False, masters="24bit"),
        ("bf16 + remainder, synchronous", 0.01),
    ),
    "bf16, 24-bit masters, asynchronous": (
        torch.bfloat16,
        fused(is_async=True, masters="24bit"),
        ("bf16 + remainder, asynchronous", 0.01),
    ),
    "bf16, 24-bit masters, 8-bit moments, asynchronous": (
        torch.bfloat16,
        fused(is_async=True, moments="8bit", masters="24bit"),
        ("bf16 + remainder, 8-bit moments, asynchronous", 0.01),
    ),
    "plain bf16, asynchronous": (torch.bfloat16, plain_bf16, None),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=FULL_STEPS)
    arguments.add_argument(
        "--in-float32", action="store_true", help="bf16 weights, but products in fp32: for processors without bf16's"
    )
    arguments.add_argument(
        "--rows", default="", metavar="REGEX", help="only rows whose name it finds; compared with those that were run"
    )
    chosen = arguments.parse_args()
    cases = {name: case for name, case in CASES.items() if re.search(chosen.rows, name)}
    if not cases:
        arguments.error(f"--rows {chosen.rows}: no row has such a name, expected one of: " + "; ".join(CASES))
    report = Report("Convergence of the demo's model", chosen.out)
    roundpipe.devices(VIRTUAL_DEVICES)
    runs = DemoRuns.prepare(chosen.steps, RATE, chosen.quick, chosen.in_float32)
    report(f"{runs}.")
    report("")
    rows, losses, failed = [], {}, []
    for name, (dtype, make, compared) in cases.items():
        model = runs.model(dtype)
        seen = runs.train(model, make(model, runs))
        losses[name] = seen.held_out
        row = [name, f"{seen.held_out:.4f}", f"{seen.seconds:.0f}", "", "", ""]
        if compared is not None and compared[0] in losses:
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
