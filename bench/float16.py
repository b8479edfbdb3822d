"""Does the demo's model survive float16? Its losses in float32, bfloat16 and float16, and how many steps are skipped.

Each row trains the demo's model from the same weights on the same batches, with synchronous steps. In float16, losses
are scaled by `roundpipe.GradScaler` as torch makes it. The program fails if float16 ends further from float32 than
stated. On the host, products of float16 matrices are added up in fp32; `ROUNDPIPE_FP16_ACCUMULATION=1` and
`--devices cuda:0` show what a card makes of it.
"""

from __future__ import annotations

import math
import sys

import torch
from support.demo_runs import CLIP_NORM, DemoRuns, Losses
from support.report import Report, parser

import roundpipe
from roundpipe.train.demo.preset import VIRTUAL_DEVICES

STEPS, RATE = 60, 3e-4  # a host computes in float16 ten times slower
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = 0.005  # how much further the held-out loss of float16 may be


def trained(runs: DemoRuns, dtype: torch.dtype, scaler: roundpipe.GradScaler) -> tuple[Losses, int]:
    """The losses of a run with these weights, and how many steps the scaler skipped."""
    model = runs.model(dtype)
    optimizer = runs.adamw(model)
    schedule = runs.schedule(optimizer)
    skipped = 0

    def make_step(step: int) -> None:
        nonlocal skipped
        made = model.step(optimizer, False, scaler=scaler, max_grad_norm=CLIP_NORM, lr_scheduler=schedule)
        skipped += made.skipped

    return runs.train(model, make_step, scaler), skipped


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--devices", default=VIRTUAL_DEVICES)
    chosen = arguments.parse_args()
    report = Report("The demo's model in float16", chosen.out)
    pool = roundpipe.devices(chosen.devices)
    runs = DemoRuns.prepare(chosen.steps, RATE, chosen.quick)
    report(f"{runs}, {pool.description}{', fp16 accumulation' if pool.fp16_accumulation else ''}.")
    report("")
    report.header(["weights", "training loss", "held-out loss", "against float32", "skipped", "last scale", "seconds"])
    first = math.nan
    for dtype in DTYPES:
        scaler = roundpipe.GradScaler(enabled=dtype == torch.float16)
        seen, skipped = trained(runs, dtype, scaler)
        first = seen.held_out if dtype == torch.float32 else first
        off = seen.held_out / first - 1
        scaling = [str(skipped), f"{scaler.get_scale():g}"] if scaler.is_enabled() else ["", ""]
        name = str(dtype).removeprefix("torch.")
        losses = [f"{seen.training:.4f}", f"{seen.held_out:.4f}", f"{100 * off:+.2f} %"]
        report.row([name, *losses, *scaling, f"{seen.seconds:.0f}"])
        if dtype == torch.float16 and not off <= ALLOWED and not chosen.quick:
            report.close()
            sys.exit(f"float16 ends {100 * off:.2f} % above float32, expected at most {100 * ALLOWED:g} %")
    report("")
    report.close()


if __name__ == "__main__":
    main()
