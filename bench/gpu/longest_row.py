"""What is the longest row of tokens that trains on a card with 24 GB, against the published package?

A model of the published sizes with random weights in bf16 (235B: adapters alone are trained), one row a step. Each
attempt is two steps in a process of its own, which may take so much of the card and no more. The lengths form a grid,
and the search halves it, so the answer is the longest length of the grid that trains, and the next one does not.
Attempts that fail for another reason than memory end the search with an error.

    python bench/gpu/longest_row.py --peer DIR [--model 1.7B|4B|8B|20B|32B|235B] [--memory-gb 24]

DIR holds the published package: pip install --target DIR --no-deps roundpipe==0.1.1
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.accelerator import default_device, describe, has_cuda
from support.language_models import SHAPES, TINY_OF
from support.processes import RunError, train
from support.report import Report, parser
from support.training_request import Request, Result

RANK = 16  # of adapters
GRID = [1024 * length for length in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)]


def attempt_in_process(request: Request, package: Path | None) -> Result:
    """For tiny models: starting a process takes longer than they do."""
    from support.training_run import run

    try:
        return run(request)
    except torch.OutOfMemoryError as error:
        raise RunError(str(error), out_of_memory=True) from None


def longest(
    attempt: Callable[[Request, Path | None], Result], request: Request, package: Path | None, grid: list[int]
) -> tuple[int, Result | None, int]:
    """The longest length of `grid` that trains, with its figures, and the shortest that does not; 0: there is none."""
    low, high = -1, len(grid)
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        tokens = grid[middle]
        try:
            result = attempt(replace(request, tokens=tokens), package)
        except RunError as error:
            if not error.out_of_memory:
                raise SystemExit(f"{tokens} tokens: {error}") from error
            high = middle
        else:
            if not all(math.isfinite(loss) for loss in result.losses):
                raise SystemExit(f"{tokens} tokens: the losses are {result.losses}")
            low, best = middle, result
        print(f"{tokens:,} tokens {'train' if low == middle else 'do not fit'}", file=sys.stderr, flush=True)
    return (grid[low] if low >= 0 else 0), best, (grid[high] if high < len(grid) else 0)


def main() -> None:
    arguments = parser(__doc__, needs=("psutil",))
    arguments.add_argument("--peer", type=Path, help="folder of the published package; without it, ours alone")
    arguments.add_argument("--model", choices=[*TINY_OF], default="1.7B")
    arguments.add_argument("--memory-gb", type=float, default=24)
    arguments.add_argument("--grain", choices=["stage", "layer"], default="layer")
    options = arguments.parse_args()

    device = default_device("virtual:1")
    memory_bytes = int(options.memory_gb * 1e9)
    shape, grid, attempt = options.model, GRID, train
    if options.quick:
        shape, grid, attempt, memory_bytes = TINY_OF[options.model], [32, 2048], attempt_in_process, 3_000_000
    request = Request(
        way="followed",
        peer=False,
        shape=shape,
        device=f"{device},memory={memory_bytes}B",
        tokens=0,
        rows=1,
        microbatches=1,
        grain=options.grain,
        memory_bytes=memory_bytes,
        modes=("sync",),
        steps=1,
        warm_up=1,
        lora_rank=RANK if SHAPES[options.model].lora else 0,
    )
    if options.quick and not request.lora_rank:
        request = replace(request, way="chain")
    runs: dict[str, tuple[Request, Path | None]] = {"ours": (request, None)}
    note = ""
    if options.peer is None:
        note = "The published package was not run: no --peer was given."
    elif not has_cuda():
        note = "The published package was not run: it needs CUDA."
    elif options.model not in ("1.7B", "4B"):
        note = "The published package was not run: its chain of this model's parts is not here."
    else:
        runs["published"] = (replace(request, way="chain", peer=True), options.peer)

    report = Report("The longest row that trains on one card under a memory cap", options.out)
    report(f"- {describe(device)}")
    report("")
    report(
        f"Model {shape}, one row, recompute by {options.grain}, {memory_bytes / 1e9:g} GB of the card, Adam on the "
        f"host. {note}"
    )
    report("")
    rows = []
    for name, (wanted, package) in runs.items():
        print(name, file=sys.stderr, flush=True)
        length, result, refused = longest(attempt, wanted, package, grid)
        rows.append(
            [
                name,
                f"{length:,}" if length else "none of the grid",
                f"{refused:,}" if refused else "all of the grid fit",
                f"{result.tokens_per_s['sync']:,.0f}" if result else "-",
                f"{result.device_peak_bytes / 1e9:.3f}" if result else "-",
            ]
        )
    report.table(["", "longest row", "does not fit", "tokens/s", "device peak GB"], rows)
    report.close()


if __name__ == "__main__":
    main()
