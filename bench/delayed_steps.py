"""Which update rule bears asynchronous steps: AdamW, or Muon with AdamW for the tables?

Each row trains the demo's model in bf16 from the same weights on the same batches, and every step of an asynchronous
row reads weights of one step ago, from the first step on: none of the remedies of docs/optimizers.md is used. The
learning rate is that of the inner layers, for both rules, since Muon's updates are scaled to the size of AdamW's; the
tables have AdamW, the same rate and the same options in every row. `delay costs` compares a row with the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.demo_runs import CLIP_NORM, TABLES, DemoRuns
from support.report import Report, parser

import roundpipe
from roundpipe.train.demo.preset import FULL_STEPS, VIRTUAL_DEVICES

Fused = roundpipe.optim.AdamW | roundpipe.optim.Muon
RATES = (7e-4,)
TABLE_RATE = 3.6e-3  # of the embedding; the head has a fifth of it, as in bench/convergence.py


def optimizer_of(rule: str, model: roundpipe.RoundPipe, runs: DemoRuns, rate: float) -> Fused:
    """The rule, with the tables' own groups."""
    largest = max(TABLES.values())
    groups = [{"params": name, "lr": TABLE_RATE * factor / largest} for name, factor in TABLES.items()]
    options = runs.rule | {"lr": rate}
    if rule == "AdamW":
        return roundpipe.optim.AdamW(model, groups=groups, **options)
    betas, decay = options["betas"], options["weight_decay"]
    of_adamw = [{**group, "use_muon": False, "betas": betas} for group in groups]
    return roundpipe.optim.Muon(
        model,
        lr=rate,
        weight_decay=decay,
        adjust_lr_fn="match_rms_adamw",
        groups=of_adamw,
        adamw={"betas": betas},
    )


def stepper(model: roundpipe.RoundPipe, runs: DemoRuns, optimizer: Fused, is_async: bool) -> Callable[[int], None]:
    """Makes the steps of a run."""
    schedule = runs.schedule(optimizer)

    def make_step(_: int) -> None:
        model.step(optimizer, is_async, max_grad_norm=CLIP_NORM, lr_scheduler=schedule)

    return make_step


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=FULL_STEPS)
    arguments.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    chosen = arguments.parse_args()
    report = Report("Asynchronous steps of AdamW and Muon", chosen.out)
    roundpipe.devices(VIRTUAL_DEVICES)
    runs = DemoRuns.prepare(chosen.steps, chosen.rates[0], chosen.quick)
    report(f"{runs}.")
    report("")
    report.header(["rate", "rule", "steps", "held-out loss", "delay costs", "seconds", "MB of moments"])
    for rate in chosen.rates[: 1 if chosen.quick else None]:
        for rule in ("AdamW", "Muon"):
            losses = []
            for is_async in (False, True):
                model = runs.model(torch.bfloat16)
                optimizer = optimizer_of(rule, model, runs, rate)
                seen = runs.train(model, stepper(model, runs, optimizer, is_async))
                losses.append(seen.held_out)
                report.row(
                    [
                        f"{rate:g}",
                        rule,
                        "asynchronous" if is_async else "synchronous",
                        f"{seen.held_out:.4f}",
                        f"{100 * (losses[-1] / losses[0] - 1):+.2f} %" if is_async else "",
                        f"{seen.seconds:.0f}",
                        f"{optimizer.host_memory().moments / 1e6:.1f}",
                    ]
                )
    report("")
    report.close()


if __name__ == "__main__":
    main()
