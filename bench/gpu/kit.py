"""What a card does, in ten minutes and one report: is it right, how fast is the link, and what do others reach on it?

First the checks: training against plain PyTorch on the card, bit for bit where it can be, and the short form of
tests/gpu. Without them no figure of this report is valid. Then the link, by bench/gpu/link.py. Then tokens a second and
the longest row of a Qwen3 of 1.7 B parameters with random weights and random tokens, full fine-tuning with AdamW on the
host: ours, the published package, torch's FSDP2 with CPU offload, and DeepSpeed's ZeRO-3 with offload.

Ours and one other train in turn, round by round, each in a process of its own, from the same weights and on the same
tokens; their losses are compared step by step, and the ratio is the median over the rounds. Rows grow until the capped
memory is full. Ours is the model as transformers has it, followed; the published package trains a chain of the model's
parts with its own chunked loss; the other two train the model as transformers has it, with its plain loss and
checkpointed layers. Whoever is missing, fails or hangs is named with its reason. Sizes and rounds are cut to keep to
the time, and the report says so. Nothing is downloaded.

Without an accelerator this is the small form: tiny sizes on virtual devices, which say nothing but that it works.

    make bench-gpu [TORCH=skip] [PEER=DIR] [BENCH_FLAGS="--minutes 5 --out FILE"]

DIR holds the published package: pip install --target DIR roundpipe==0.1.1 --no-deps
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.accelerator import default_device, describe
from support.budget import Budget, Deadline
from support.checks import Check, bench_program, card_tests, equality
from support.comparison import Comparison, ContestantError, Size, compare, longest_row
from support.contestants import Contestant, Mode, contestants
from support.report import Report, parser
from support.training_request import Request

SHARES = {"checks": 0.25, "link": 0.1, "throughput": 0.4, "longest row": 0.25}
# Rows of a microbatch are few, so that a plain loss fits small cards, too. Each takes four times as many tokens.
SIZES = [Size(2, 1024, 2), Size(4, 2048, 4), Size(8, 4096, 8)]
GRID = [1024 * length for length in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
# Relative distance of two losses: of about 12 that were summed in bf16 by different kernels, and in fp32.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 1e-4}


def report_checks(report: Report, spec: str, on_card: bool, deadline: Deadline) -> bool:
    """Runs the checks, and says whether all passed."""
    checks: Sequence[Check] = [*equality(spec, deadline.share(2)), card_tests(on_card, deadline)]
    report("## Checks")
    report("")
    rows = [[check.name, f"FAILED: {check.wrong}" if check.wrong else "passed", check.note] for check in checks]
    report.table(["check", "result", ""], rows)
    passed = not any(check.wrong for check in checks)
    if passed:
        report("All checks passed.")
    else:
        report("**Not all checks passed: no figure below is valid.**")
    report("")
    return passed


def report_link(report: Report, spec: str, small: bool, deadline: Deadline) -> None:
    sizes = ["--quick"] if small else ["--width", "4096", "--layers", "16", "--many-rows", "8192", "--rounds", "3"]
    report("## Link")
    report("")
    try:
        report(bench_program("gpu/link", ["--device", spec, *sizes], deadline))
    except RuntimeError as error:
        report(f"- no figures of the link: {error}")
    report("")


def rows_of(compared: Comparison, ours: Contestant, others: Sequence[Contestant]) -> list[list[str]]:
    """Of the table of tokens a second."""
    rows = []
    for mode in ("async", "sync"):
        if (ours.name, mode) not in compared.rates:
            continue
        row = [mode, str(compared.size), str(compared.rounds), f"{compared.rate(ours.name, mode):,.0f}"]
        others_here = [other for other in others if (other.name, mode) in compared.rates]
        for other in others_here:
            rate, ratio = compared.rate(other.name, mode), compared.ratio(ours.name, other.name, mode)
            rows.append([other.name, *row, f"{rate:,.0f}", f"{ratio:.3f}", f"{compared.distance:.1e}"])
        if not others_here:
            rows.append(["nobody", *row, "-", "-", "-"])
    return rows


def report_throughput(
    report: Report, ours: Contestant, peers: Sequence[Contestant], small: bool, bound: float, deadline: Deadline
) -> bool:
    """Whether there are figures of ours, and nobody's losses differ."""
    steps, sizes = (1, [Size(4, 32, 2)]) if small else (3, SIZES)
    rows: list[list[str]] = []
    notes: list[str] = []
    fine = True
    left: set[Mode] = set(ours.modes)

    def meet(sides: list[Contestant], alone: list[Mode], until: Deadline, sizes: Sequence[Size]) -> Sequence[Size]:
        """Adds rows or a note; the sizes for whoever comes next."""
        nonlocal fine
        name = " and ".join(side.name for side in sides[1:]) or ours.name
        try:
            compared = compare(sides, sizes, alone, steps, until)
        except ContestantError as error:
            smaller = [size for size in sizes if error.too_large and size.total < error.too_large.total]
            if not smaller:
                whose = "" if error.contestant.name == name else f"{error.contestant.name}: "
                notes.append(f"no figures of {name}: {whose}{error}")
                return sizes
            notes.append(f"{name}: smaller batches, since {error.contestant.name}: {error}")
            return meet(sides, alone, until, smaller)
        if compared.distance > bound:
            notes.append(f"no figures of {name}: a loss differs from ours by {compared.distance:.1e} of its value")
            fine = False
            return sizes
        rows.extend(rows_of(compared, ours, sides[1:]))
        left.difference_update(mode for _, mode in compared.rates)
        if compared.cut:
            notes.append(f"{name}: {compared.cut}")
        return [compared.size]

    present = [peer for peer in peers if not peer.missing]
    for index, peer in enumerate(present):
        alone = [mode for mode in ours.modes if mode in left and mode not in peer.modes]
        # Half a share is kept for ours alone, which is needed if all of these fail.
        sizes = meet([ours, peer], alone, deadline.share(len(present) - index + 0.5), sizes)
    if left:
        meet([ours], [], deadline, sizes)
    notes += [f"no figures of {peer.name}: {peer.missing}" for peer in peers if peer.missing]
    report("## Tokens a second")
    report("")
    report(
        f"Full fine-tuning, AdamW on the host, medians over rounds of {steps} steps in which both took turns; ours "
        f"recomputes by {ours.request.grain}. Ratio: ours to the other's. Losses of all steps agree within "
        f"{bound:.1e} of their value; the last column is the largest distance."
    )
    report("")
    report.table(["against", "steps", "batch", "rounds", "ours", "theirs", "ratio", "losses"], rows)
    close_part(report, notes)
    return fine and not left


def report_longest(
    report: Report,
    ours: Contestant,
    peers: Sequence[Contestant],
    memory_bytes: int,
    grid: Sequence[int],
    deadline: Deadline,
) -> None:
    rows: list[list[str]] = []
    notes: list[str] = []
    lengths: dict[str, int] = {}
    present = [side for side in (ours, *peers) if not side.missing and not side.uncapped]
    for index, side in enumerate(present):
        try:
            row = longest_row(side, grid, deadline.share(len(present) - index))
        except ContestantError as error:
            notes.append(f"no figures of {side.name}: {error}")
            continue
        lengths[side.name] = row.tokens if row.full else 0
        mine = lengths.get(ours.name, 0)
        # What the time has cut off is nobody's longest row.
        ratio = f"{mine / row.tokens:.2f}" if mine and row.tokens and row.full else "-"
        rows.append([side.name, f"{row.tokens:,}" if row.tokens else "none", row.end, ratio])
    notes += [f"no figures of {peer.name}: {peer.missing or peer.uncapped}" for peer in peers if peer not in present]
    report("## Longest row")
    report("")
    report(
        f"One row a step, recomputation by {ours.request.grain}, {memory_bytes / 1e9:g} GB of the device. Each row has "
        f"two steps; tried were {', '.join(f'{tokens:,}' for tokens in grid)}."
    )
    report("")
    report.table(["", "longest row", "what came after", "ours to it"], rows)
    close_part(report, notes)


def close_part(report: Report, notes: Sequence[str]) -> None:
    for note in notes:
        report(f"- {note}")
    if notes:
        report("")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peer", type=Path, help="folder of the published package")
    arguments.add_argument("--deepspeed", type=Path, help="folder of DeepSpeed, where this Python has none")
    arguments.add_argument("--model", choices=["1.7B", "4B", "8B"], default="1.7B")
    arguments.add_argument("--minutes", type=float, default=10, help="for all of it [10]")
    arguments.add_argument("--memory-gb", type=float, default=8, help="the cap of the longest rows [8]")
    options = arguments.parse_args()

    spec = default_device("virtual:1")
    on_card = not spec.startswith("virtual")
    small = options.quick or not on_card
    if small:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of models so small would mostly wait for each other
    budget = Budget(60 * options.minutes - 10, SHARES)  # what ends late is stopped, which takes a moment
    # Of the card for each of two that take turns: the other one's context and what it keeps stay there meanwhile.
    turn_bytes = 0 if small else int(0.85 * torch.get_device_module(spec.partition(":")[0]).mem_get_info(0)[1])
    request = Request(
        way="followed",
        peer=False,
        shape="tiny" if small else options.model,
        device=f"{spec},memory={turn_bytes}B" if turn_bytes else spec,
        tokens=GRID[-1],
        rows=1,
        microbatches=1,
        grain="stage",
        memory_bytes=turn_bytes,
    )
    ours, peers = contestants(request, options.peer, options.deepspeed)
    report = Report("A card: checks, link, tokens a second and the longest row, against other systems", options.out)
    report(f"- {describe(spec)}")
    report(f"- model: Qwen3 {request.shape}, random weights and tokens, {'bf16' if on_card else 'fp32'}")
    if small:
        why = "it was asked for" if options.quick else "torch sees no accelerator"
        report(f"- form: small, since {why}; its figures say nothing but that it works")
    else:
        report(f"- form: full, at most {options.minutes:g} minutes; {turn_bytes / 1e9:.1f} GB of the card for each")
    if not on_card:
        report("- FSDP2 here shards over one process on the host, by gloo: its offload moves nothing")
    report("")
    passed = report_checks(report, spec, on_card, budget["checks"])
    report_link(report, spec, small, budget["link"])
    bound = BOUNDS[torch.bfloat16 if on_card else torch.float32]
    fine = report_throughput(report, ours, peers, small, bound, budget["throughput"])
    memory_bytes, grid = (12_000_000, [32, 4096]) if small else (int(options.memory_gb * 1e9), GRID)
    way = "chain" if small else "followed"
    capped, capped_peers = contestants(
        replace(request, way=way, grain="layer", memory_bytes=memory_bytes, device=f"{spec},memory={memory_bytes}B"),
        options.peer,
        options.deepspeed,
    )
    report_longest(report, capped, capped_peers, memory_bytes, grid, budget["longest row"])
    report.close()
    if not (passed and fine):
        raise SystemExit("a check failed, or there are no figures of ours that agree with the others: see the report")


if __name__ == "__main__":
    main()
