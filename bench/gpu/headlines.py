"""Does one card with 24 GB train what the published system does with it?

Under a cap on the card's memory, one process each:

1. a model of 8 B parameters in full, with 8-bit moments;
2. 16 layers of the width of 32B in full, with 8-bit moments;
3. 94 layers of the width of 235B with adapters on frozen weights. The host holds the frozen weights of one layer, which
   all layers share, so that a machine with less memory can run it. Nothing may stay on the card (`resident=0`): each
   layer uploads them as if they were its own, so that a step moves every byte that the real model's moves.

Weights and tokens are random. The first loss is compared with the one of transformers' model, computed layer by layer
beside the pipeline. The embedding and the head are the real ones.

    python bench/gpu/headlines.py [--memory-gb 24] [--only 8B 32B 235B]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.accelerator import default_device, describe
from support.budget import Budget, Deadline
from support.comparison import ContestantError, Setting, Side, Size, distance, timed
from support.contestants import Contestant
from support.language_models import TINY_OF
from support.report import Report, parser
from support.training_request import Request

STEPS = 2  # that are timed
# Of the first loss, against plain transformers in bf16, which rounds in another order; in fp32 on a host.
BOUNDS = {True: 2**-8, False: 1e-4}


@dataclass(frozen=True)
class Headline:
    """A model that is too large for a card, and the batch that it is trained on.

    Attributes:
        layers: decoder layers, where not all.
        lora_rank: adapters are trained on a frozen base that all layers share; 0: all weights are trained.
    """

    name: str
    shape: str
    size: Size
    microbatches: int
    layers: int = 0
    lora_rank: int = 0

    def small(self) -> Headline:
        """The same, tiny."""
        return replace(self, shape=TINY_OF[self.shape], size=Size(4, 32), microbatches=2, layers=4)


HEADLINES = [
    Headline("8B in full, 8-bit moments", "8B", Size(4, 8192), 4),
    Headline("94 layers of 235B, adapters of rank 16, one layer's frozen weights", "235B", Size(4, 8192), 4, 0, 16),
    Headline("16 layers of 32B in full, 8-bit moments", "32B", Size(4, 8192), 4, 16),
]


def report_headlines(
    report: Report, headlines: Sequence[Headline], spec: str, cap_bytes: int, bound: float, deadline: Deadline
) -> None:
    """A row for each; `cap_bytes` of the device, 0: no cap."""
    report("## Large models on one card")
    report("")
    cap = f"{cap_bytes / 1e9:g} GB of it" if cap_bytes else "without a cap"
    report(f"One card, {cap}; two asynchronous steps after one that warms up. The first loss is within {bound:.1e} of")
    report("that of transformers' model. Host GB: weights, gradients and optimizer state by our own account.")
    report("")
    header = ["", "tokens", "parameters", "host GB", "GB of the card", "GB up a step", "tokens/s", "TFLOP/s"]
    report.header([*header, "loss", "transformers' loss", "set up in s"])
    notes = []
    capped = f",memory={cap_bytes}B" if cap_bytes else ""
    for index, headline in enumerate(headlines):
        until = deadline.share(len(headlines) - index)
        request = Request(
            way="followed",
            peer=False,
            shape=headline.shape,
            device=spec + capped + (",resident=0" if headline.lora_rank else ""),  # or one copy would serve all layers
            tokens=headline.size.tokens,
            rows=1,
            microbatches=1,
            grain="layer",
            layers=headline.layers,
            lora_rank=headline.lora_rank,
            shared_base=headline.lora_rank > 0,
            moments="8bit",
            memory_bytes=cap_bytes,
        )
        try:
            report.row(_row(headline, Side(Contestant("ours", request), expect=True), bound, until))
        except ContestantError as error:
            notes.append(f"{headline.name}: no figures: {error}")
    report.notes(notes)


def _row(headline: Headline, side: Side, bound: float, deadline: Deadline) -> list[str]:
    size = headline.size
    setting = Setting(headline.microbatches, "layers")
    with side:
        ready = side.set_up(deadline)
        first = side.ask(timed(Size(1, size.tokens), Setting(1, "layers"), "sync", 1, warm_up=0), deadline)
        if first is None or ready.expected_loss is None:
            raise ContestantError(f"out of memory with one row of {size.tokens:,} tokens")
        loss = first.losses[0]
        apart = distance([loss], [ready.expected_loss])
        if apart > bound:
            raise ContestantError(f"the loss is {loss}, transformers' is {ready.expected_loss}: {apart:.1e} apart")
        rate = side.lap(size, setting, "async", STEPS, deadline)
        return [
            *(headline.name, f"{size} in {setting}", f"{ready.parameters / 1e9:.2f} G"),
            *(f"{side.host_bytes / 1e9:.1f}", f"{side.peak_bytes / 1e9:.1f}" if side.peak_bytes else "-"),
            *(f"{side.uploaded_bytes / STEPS / 1e9:.4g}", f"{rate:,.0f}", f"{side.teraflops(size, rate):.1f}"),
            *(f"{loss:.4f}", f"{ready.expected_loss:.4f}"),
            f"{ready.seconds:.0f}",
        ]


def main() -> None:
    arguments = parser(__doc__, needs=("peft", "psutil"))
    arguments.add_argument("--memory-gb", type=float, default=24, help="the cap [24]")
    arguments.add_argument("--only", nargs="+", choices=[headline.shape for headline in HEADLINES], help="[all]")
    arguments.add_argument("--minutes", type=float, default=20, help="at most [20]")
    options = arguments.parse_args()
    spec = default_device("virtual:1")
    on_card = torch.accelerator.is_available()
    chosen = [headline for headline in HEADLINES if headline.shape in (options.only or [headline.shape])]
    cap_bytes = int(options.memory_gb * 1e9) if on_card else 0
    if options.quick:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        chosen, cap_bytes = [headline.small() for headline in chosen], 0
    report = Report("Large models on one card under a cap", options.out)
    report(f"- {describe(spec)}")
    report("")
    deadline = Budget(60 * options.minutes, {"all": 1})["all"]
    report_headlines(report, chosen, spec, cap_bytes, BOUNDS[on_card], deadline)
    report.close()


if __name__ == "__main__":
    main()
