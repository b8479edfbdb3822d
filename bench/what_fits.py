"""Which published models train on one card, by the host's memory: `roundpipe plan` for each, predicted.

A cell has the predicted tokens a second, with the microbatches of a step if they are fewer than training takes; `-`
does not fit. The machine is described, not measured: a card of `--memory` that reaches `--tflops`, links of 25 GB/s in
each direction, a host whose memory gives links 60 GB/s and whose optimizer updates 6 GB of bf16 weights a second, and a
disk for moments that reads 3 GB/s while it writes as much. Least memory: synchronous steps with 8-bit moments, masters
of 24 bits and gradients that are used at once.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from support.published_models import MODELS
from support.report import Report, parser

from roundpipe.plan.machine import Machine
from roundpipe.plan.options import PlanOptions
from roundpipe.plan.within_memory import plan_within_memory

LEAST: dict[str, Any] = {"mode": "sync", "moments": "8bit", "masters": "24bit", "gradients_at_once": True}
WAYS: dict[str, dict[str, Any]] = {
    "all weights, fp32 moments": {},
    "all weights, 8-bit moments": {"moments": "8bit"},
    "all weights, least memory": LEAST,
    "all weights, least memory, disk": LEAST | {"disk": "/nvme", "disk_holds": "masters"},
    "LoRA of rank 16": {"train": "lora"},
}
RATES = {"link_up_gb_per_s": 25.0, "link_down_gb_per_s": 25.0, "host_gb_per_s": 60.0}
DESCRIBED = Machine("one card", [(1.0, 0)], RATES, update_gb_per_s=6.0, disk={"disk_both_gb_per_s": 3.0})
# Fused attention alone is predicted.
NAMES = [name for name in MODELS if name != "gpt-oss-20b"]


def cell(options: PlanOptions) -> str:
    planned = plan_within_memory(options)
    if not planned.fits:
        return "-"
    request = planned.fit.request
    speed = request.microbatches * (options.tokens or 0) / planned.fit.choices[0].step_ms * 1000
    fewer = "" if request.microbatches == request.devices + 1 else f" ({request.microbatches})"
    return f"{speed:,.0f}{fewer}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    hosts = ["64GB", "128GB", "192GB", "256GB", "512GB"]
    arguments.add_argument("--hosts", nargs="+", default=hosts, help="memory of the host")
    arguments.add_argument("--memory", default="24GB", help="of the card")
    arguments.add_argument("--tokens", type=int, default=8192, help="of a microbatch, in one row")
    arguments.add_argument("--tflops", type=float, default=100.0, help="what the card reaches")
    options = arguments.parse_args()
    seconds = None
    if options.quick:
        options.models, options.hosts, seconds = options.models[:1], options.hosts[:1], 0.001
    report = Report(f"What trains on one card of {options.memory}, by the host's memory", options.out)
    report(
        f"Predicted tokens a second; {options.tokens:,} tokens a microbatch, {options.tflops:g} TFLOP/s, links of 25 "
        "GB/s. In brackets: microbatches of a step, where the host has no room for two."
    )
    report("")
    report.header(["model", "trained", *options.hosts])
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "machine.toml")
        DESCRIBED.save(machine)
        for name in options.models:
            MODELS[name].config().save_pretrained(Path(folder, name))
            for way, values in WAYS.items():
                cells = [
                    cell(
                        PlanOptions(
                            model=str(Path(folder, name)),
                            devices=1,
                            memory=options.memory,
                            host_memory=host,
                            tokens=options.tokens,
                            tflops=options.tflops,
                            machine=machine,
                            search_seconds=seconds,
                            **values,
                        )
                    )
                    for host in options.hosts
                ]
                report.row([name, way, *cells])
    report.close()


if __name__ == "__main__":
    sys.exit(main())
