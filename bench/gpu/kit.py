"""What a card does, in nine minutes and one report: is it right, how fast is it, and what do others reach on it?

First the checks: training against plain PyTorch on the card, bit for bit where it can be, and the short form of
tests/gpu. Without them no figure of this report is valid. Then a Qwen3 of 1.7 B parameters with random weights and
random tokens, full fine-tuning: tokens a second of ours and of others, a profile of one step, the longest row under a
cap, models that are too large for a 24 GB card under that cap, a model of 4 B parameters, 1, 2, 4 and 8 cards, and the
link.

Others are the published package, torch's FSDP2 with CPU offload, a plain loop with everything on the card, DeepSpeed's
ZeRO-3 with offload, and TrainStream. Everybody is at its own best: the number of microbatches and whether activations
are recomputed are found before anything is timed; weights are uploaded in 16 bits; losses are computed in chunks. What
each got is in the report. Ours and one other train in turn, round by round, each in a process of its own, on the same
tokens; a ratio is the median over the rounds. Three steps that learn, from the same weights, are compared loss by loss
before that, and so are the losses of all timed steps, whose learning rate is so small that they can be.

Every row is written when it is measured: a run that is cut leaves a valid report. Whoever is missing, fails or hangs is
named with its reason. Nothing is downloaded. Without an accelerator this is the small form: tiny sizes on virtual
devices, which say nothing but that it works.

    make bench-gpu [TORCH=skip] [PEER=DIR] [BENCH_FLAGS="--minutes 5 --out FILE --parts checks throughput"]

DIR holds the packages of others that this Python lacks: pip install --target DIR roundpipe==0.1.1 --no-deps ...
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.headlines import HEADLINES, report_headlines
from support.accelerator import default_device, describe
from support.budget import Budget, Deadline
from support.checks import Check, bench_program, card_tests, equality
from support.comparison import (
    Comparison,
    ContestantError,
    LossesDifferError,
    Setting,
    Side,
    Size,
    best_setting,
    compare,
    distance,
    longest_row,
    timed,
)
from support.contestants import Contestant, Mode, contestants
from support.report import Report, parser
from support.training_request import Request

SHARES = {
    "checks": 20,
    "throughput": 60,
    "arithmetic": 14,
    "headlines": 20,
    "longest row": 14,
    "4B": 14,
    "cards": 0,
    "link": 4,
}
SIZES = [Size(8, 4096), Size(32, 4096)]
GRID = [1024 * length for length in (4, 8, 16, 24, 32, 48, 73, 96, 128, 192)]
PUBLISHED_ROW = 1024 * 73  # of 1.7B on 24 GB (arXiv:2604.27085)
ROUNDS = 2
# Relative distance of two losses: of about 12 that were summed in bf16 by different kernels, and in fp32.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 1e-4}
HEADER = ["", "steps", "tokens", "in", "tokens/s", "TFLOP/s", "GB of the card"]


def report_checks(report: Report, spec: str, on_card: bool, deadline: Deadline) -> bool:
    """Runs the checks, and says whether all passed."""
    report("## Checks")
    report("")
    report.header(["check", "result", ""])
    passed = True
    for part in (lambda: equality(spec, deadline.share(2)), lambda: [card_tests(on_card, deadline)]):
        checks: Sequence[Check] = part()
        for check in checks:
            report.row([check.name, f"FAILED: {check.wrong}" if check.wrong else "passed", check.note])
            passed = passed and not check.wrong
    report("")
    report("All checks passed." if passed else "**Not all checks passed: no figure below is valid.**")
    report("")
    return passed


def report_program(report: Report, title: str, name: str, arguments: list[str], deadline: Deadline) -> None:
    """What another benchmark reports, under a title."""
    report(f"## {title}")
    report("")
    try:
        report(bench_program(name, arguments, deadline))
    except RuntimeError as error:
        report(f"- no figures: {error}")
    report("")


def report_link(report: Report, spec: str, small: bool, deadline: Deadline) -> None:
    sizes = ["--quick"] if small else ["--width", "4096", "--layers", "16", "--many-rows", "8192", "--rounds", "3"]
    report_program(report, "Link", "gpu/link", ["--device", spec, *sizes], deadline)


def report_arithmetic(report: Report, spec: str, small: bool, deadline: Deadline) -> None:
    """A layer in both forms and both 16-bit dtypes, and small models; its checks are the program's own."""
    sizes = ["--quick"] if small else ["--tokens", "8192", "--dtypes", "bf16", "fp16", "--trained", "1.7B"]
    sizes += [] if small else ["--layers", "8", "--rows", "8", "--length", "4096", "--vocabulary", "151936"]
    report_program(report, "Exact and fast arithmetic", "arithmetic", ["--device", spec, *sizes], deadline)


def figures(side: Side, mode: Mode, size: Size, setting: Setting, rate: float) -> list[str]:
    """The cells of HEADER."""
    row = [side.name, mode, str(size), str(setting), f"{rate:,.0f}", f"{side.teraflops(size, rate):.1f}"]
    return [*row, f"{side.peak_bytes / 1e9:.1f}" if side.peak_bytes else "-"]


def report_profile(report: Report, side: Side, size: Size, setting: Setting, deadline: Deadline) -> None:
    """What the card does in one synchronous step."""
    result = side.ask(timed(size, setting, "sync", 1, profiled=True), deadline)
    if result is None or not result.profile:
        return
    seen = result.profile
    report(f"### One step of ours: {size} tokens in {setting}, synchronous, under torch's profiler")
    report("")
    if not seen["kernels"]:
        report("- no kernels were seen: there is no accelerator, or torch cannot profile it")
        report("")
        return
    span_ms = seen["span_ms"]
    report(
        f"From the first kernel's begin to the last one's end {span_ms:,.0f} ms; in {seen['busy_ms'] / span_ms:.1%} of "
        f"it a kernel ran; the longest gap was {seen['longest_gap_ms']:.1f} ms."
    )
    report("")
    report.table(["kernels", "ms", "count"], [[n, f"{ms:,.1f}", f"{count:,}"] for n, ms, count in seen["kinds"]])
    cells = [[f"`{n.replace('|', ' ')}`", f"{ms:,.1f}", f"{count:,}"] for n, ms, count in seen["kernels"]]
    report.table(["the longest", "ms", "count"], cells)
    cells = [[way, f"{ms:,.1f}", f"{size:.2f}", f"{rate:.1f}"] for way, ms, size, rate in seen["copies"]]
    report.table(["copies", "ms", "GB", "GB/s"], cells)


class Throughput:
    """Tokens a second of ours and of others, in the sizes of `sizes`, the first of which is also profiled."""

    def __init__(self, report: Report, sizes: Sequence[Size], limit_bytes: int, bound: float, small: bool) -> None:
        self._report = report
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._bound = bound
        self._check_tokens = 32 if small else 1024
        self._settings: dict[Size, Setting] = {}
        self._first_losses: list[float] = []

    def ours(self, side: Side, deadline: Deadline) -> None:
        """Sets ours up, and writes its own rows. Raises ContestantError."""
        side.set_up(deadline)
        self._first_losses = side.first_losses(self._check_tokens, deadline)
        for size, smaller in zip(self._sizes, [None, *self._sizes], strict=False):
            known = (smaller, self._settings[smaller]) if smaller else None
            self._settings[size] = best_setting(side, size, self._limit_bytes, deadline, known)
        self._report.header(HEADER)
        for size, setting in self._settings.items():
            for mode in side.contestant.modes:
                steps = 1 if size != self._sizes[0] else 3
                self._report.row(figures(side, mode, size, setting, side.lap(size, setting, mode, steps, deadline)))
        self._report("")

    def profile(self, side: Side, deadline: Deadline) -> None:
        report_profile(self._report, side, self._sizes[0], self._settings[self._sizes[0]], deadline)

    def others(self, ours: Side, sides: Sequence[Side], missing: Sequence[Contestant], deadline: Deadline) -> bool:
        """Rows of all `sides`, one after the other; whether no losses differed."""
        self._report.header([*HEADER, "ours beside it", "ours, times", "by round", "losses differ by"])
        notes = [f"{peer.name}: no figures: {peer.missing}" for peer in missing]
        fine = True
        for index, side in enumerate(sides):
            until = deadline.share(max(1.0, 0.4 * (len(sides) - index)))  # the first ones matter most
            try:
                side.set_up(until)
                self._meet(ours, side, until, deadline)
                notes.append(f"{side.name}: {side.contestant.settings}")
            except ContestantError as error:
                notes.append(f"{side.name}: no more figures: {error}")
                fine = fine and not isinstance(error, LossesDifferError)
            side.__exit__(None, None, None)
        self._report.notes([f"{ours.name}: {ours.contestant.settings}", *notes])
        return fine

    def _meet(self, ours: Side, side: Side, deadline: Deadline, everybodys: Deadline) -> None:
        first = distance(self._first_losses, side.first_losses(self._check_tokens, deadline))
        if first > self._bound:
            raise LossesDifferError(f"its losses of three steps that learn differ by {first:.1e} of ours")
        known: tuple[Size, Setting] | None = None
        for size in self._sizes:
            setting = best_setting(side, size, self._limit_bytes, deadline, known)
            known = (size, setting)
            steps, rounds = (2, ROUNDS) if size == self._sizes[0] else (1, 1)
            for mode in (mode for mode in side.contestant.modes if mode in ours.contestant.modes):
                compared = compare(
                    *((ours, side), (self._settings[size], setting), size, mode, steps, rounds),
                    (everybodys, deadline),
                )
                compared.distance = max(compared.distance, first)
                self._row(compared, side, mode, size, setting)

    def _row(self, compared: Comparison, side: Side, mode: Mode, size: Size, setting: Setting) -> None:
        if compared.distance > self._bound:
            raise LossesDifferError(f"its losses differ by {compared.distance:.1e} of ours")
        mine, theirs = compared.medians
        by_round = ", ".join(f"{ratio:.3f}" for ratio in compared.ratios)
        cells = [f"{mine:,.0f}", f"{statistics.median(compared.ratios):.3f}", by_round, f"{compared.distance:.1e}"]
        self._report.row([*figures(side, mode, size, setting, theirs), *cells])


def report_throughput(
    report: Report,
    ours: Contestant,
    peers: Sequence[Contestant],
    sizes: Sequence[Size],
    limit_bytes: int,
    bound: float,
    small: bool,
    deadline: Deadline,
) -> bool:
    """Whether there are figures of ours, and nobody's losses differ."""
    report("## Tokens a second")
    report("")
    report(
        f"Full fine-tuning with AdamW, fp32 masters and moments. TFLOP/s: six operations for each weight of a matrix "
        f"and token, and causal attention; what is recomputed does not count. Losses agree within {bound:.1e} of their "
        f"value, of three steps that learn and of every timed step; the last column is the largest distance."
    )
    report("")
    measured = Throughput(report, sizes, limit_bytes, bound, small)
    with ExitStack() as stack:
        side = stack.enter_context(Side(ours))
        # They import what they need while ours sets up.
        others = [stack.enter_context(Side(peer)) for peer in peers if not peer.missing]
        try:
            measured.ours(side, deadline)
            measured.profile(side, deadline)
        except ContestantError as error:
            report("")
            report(f"- no figures of ours: {error}")
            report("")
            return False
        return measured.others(side, others, [peer for peer in peers if peer.missing], deadline)


def report_one_by_one(
    report: Report,
    title: str,
    sides: Sequence[Contestant],
    size: Size,
    limit_bytes: int,
    bound: float,
    deadline: Deadline,
) -> None:
    """Models of which two do not fit beside each other in the host's memory: one after the other."""
    report(f"## {title}")
    report("")
    report("One after the other, since the host does not hold both; each in its best setting, three steps.")
    report("")
    report.header([*HEADER, "losses differ by"])
    notes = []
    mine: list[float] = []
    for index, contestant in enumerate(sides):
        until = deadline.share(len(sides) - index)
        try:
            with Side(contestant) as side:
                side.set_up(until)
                setting = best_setting(side, size, limit_bytes, until)
                for mode in contestant.modes:
                    row = figures(side, mode, size, setting, side.lap(size, setting, mode, 3, until))
                    mine = mine or side.losses
                    apart = distance(mine, side.losses)
                    if apart > bound:
                        raise LossesDifferError(f"its losses differ by {apart:.1e} of ours")
                    report.row([*row, f"{apart:.1e}"])
            notes.append(f"{contestant.name}: {contestant.settings}")
        except ContestantError as error:
            notes.append(f"{contestant.name}: no more figures: {error}")
    report.notes(notes)


def report_longest(
    report: Report,
    sides: Sequence[Contestant],
    memory_bytes: int,
    grid: Sequence[int],
    first: int,
    bound: float,
    deadline: Deadline,
) -> None:
    report("## Longest row")
    report("")
    report(
        f"One row a step, {memory_bytes / 1e9:g} GB of the card. Tried were, from {first:,} on: "
        f"{', '.join(f'{tokens:,}' for tokens in grid)}. A row trains if a whole step does; losses of the rows that "
        f"ours trained, too, agree within {bound:.1e}."
    )
    report("")
    report.header(["", "longest row", "does not fit", "tokens/s then", "GB of the card", "losses differ by"])
    notes = []
    mine: dict[int, float] = {}
    present = [side for side in sides if not side.missing and not side.uncapped]
    for index, contestant in enumerate(present):
        until = deadline.share(len(present) - index)
        try:
            with Side(contestant) as side:
                side.set_up(until)
                found = longest_row(side, grid, first, until)
            mine = mine or found.losses
            both = [tokens for tokens in found.losses if tokens in mine]
            apart = max((distance([mine[t]], [found.losses[t]]) for t in both), default=0.0)
            if apart > bound:
                raise LossesDifferError(f"its losses differ by {apart:.1e} of ours")
            report.row(
                [
                    *(side.name, f"{found.tokens:,}" if found.tokens else "none"),
                    f"{found.refused:,}" if found.refused else "not reached",
                    *(f"{found.tokens_per_s:,.0f}", f"{found.peak_bytes / 1e9:.1f}" if found.peak_bytes else "-"),
                    f"{apart:.1e}" if both else "-",
                ]
            )
            notes.append(f"{side.name}: {contestant.settings}{f'; ended: {found.ended}' if found.ended else ''}")
        except ContestantError as error:
            notes.append(f"{contestant.name}: no figures: {error}")
    others = [side for side in sides if side not in present]
    report.notes([*notes, *(f"{side.name}: no figures: {side.missing or side.uncapped}" for side in others)])


def report_cards(
    report: Report, ours: Sequence[tuple[int, Contestant]], tokens: int, limit_bytes: int, deadline: Deadline
) -> None:
    """Tokens a second on 1, 2, 4 and 8 cards, of rows in proportion to the cards."""
    report("## Several cards")
    report("")
    if len(ours) < 2:
        report("- one card is here, so there is no table of 1, 2, 4 and 8")
        report("")
        return
    report("Rows of a step in proportion to the cards, twice as many microbatches as cards or more; three steps.")
    report("")
    report.header(["cards", *HEADER, "of one card"])
    notes = []
    one: dict[Mode, float] = {}
    for index, (cards, contestant) in enumerate(ours):
        until = deadline.share(len(ours) - index)
        size = Size(8 * cards, tokens)
        try:
            with Side(contestant) as side:
                side.set_up(until)
                best = best_setting(side, size, limit_bytes, until)
                setting = replace(best, microbatches=max(best.microbatches, 2 * cards))
                for mode in contestant.modes:
                    rate = side.lap(size, setting, mode, 3, until)
                    row = figures(side, mode, size, setting, rate)
                    report.row([str(cards), *row, f"{rate / one.setdefault(mode, rate):.2f}"])
        except ContestantError as error:
            notes.append(f"{cards} cards: no more figures: {error}")
    report.notes(notes)


def for_long_rows(contestant: Contestant) -> Contestant:
    """With the settings that take the least of the card."""
    offloads = contestant.request.way in ("fsdp2", "zero3")
    settings = f"{contestant.settings}, inputs of its layers on the host" if offloads else contestant.settings
    return replace(contestant, recomputes=("offloaded" if offloads else "layers",), settings=settings)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peer", type=Path, help="folder of others' packages")
    arguments.add_argument("--model", choices=["1.7B", "4B", "8B"], default="1.7B")
    arguments.add_argument("--minutes", type=float, default=9, help="for all of it [9]")
    arguments.add_argument("--memory-gb", type=float, default=24, help="the cap of long rows and large models [24]")
    arguments.add_argument("--parts", nargs="+", choices=SHARES, default=[*SHARES], help="[all, in this order]")
    options = arguments.parse_args()
    folder = options.peer.resolve() if options.peer else None

    spec = default_device("virtual:1")
    on_card = not spec.startswith("virtual")
    small = options.quick or not on_card
    if small:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of models so small would mostly wait for each other
    shares = SHARES | ({"cards": 40} if not on_card or torch.accelerator.device_count() > 1 else {})
    # What ends late is stopped, which takes a moment.
    budget = Budget(60 * options.minutes - 10, {part: shares[part] for part in options.parts})
    # Of the card for each of two that take turns: the other one's context and what it keeps stay there meanwhile.
    turn_bytes = 0 if small else int(0.85 * torch.get_device_module(spec.partition(":")[0]).mem_get_info(0)[1])
    sizes = [Size(4, 32), Size(8, 32)] if small else SIZES
    request = Request(
        way="followed",
        peer=False,
        shape="tiny" if small else options.model,
        device=f"{spec},memory={turn_bytes}B" if turn_bytes else spec,
        tokens=max(size.tokens for size in sizes),
        rows=1,
        microbatches=1,
        grain="stage",
        memory_bytes=turn_bytes,
    )
    report = Report("A card: checks, tokens a second, long rows and large models, against other systems", options.out)
    report(f"- {describe(spec)}")
    report(f"- model: {request.shape}, random weights and tokens, {'bf16' if on_card else 'fp32'}")
    if small:
        why = "it was asked for" if options.quick else "torch sees no accelerator"
        report(f"- form: small, since {why}; its figures say nothing but that it works")
    else:
        report(f"- form: full, at most {options.minutes:g} minutes; {turn_bytes / 1e9:.1f} GB of the card for each")
    if not on_card:
        report("- FSDP2 here shards over one process on the host, by gloo: its offload moves nothing")
    report("")
    bound = BOUNDS[torch.bfloat16 if on_card else torch.float32]
    cap_bytes = 12_000_000 if small else int(options.memory_gb * 1e9)
    fine = True

    def checks() -> None:
        nonlocal fine
        fine = report_checks(report, spec, on_card, budget["checks"]) and fine

    def throughput() -> None:
        nonlocal fine
        ours, peers = contestants(request, folder)
        fine = report_throughput(report, ours, peers, sizes, turn_bytes, bound, small, budget["throughput"]) and fine

    def arithmetic() -> None:
        report_arithmetic(report, spec, small, budget["arithmetic"].share(2))
        followed = replace(request, way="followed")
        forms = [
            replace(contestants(replace(followed, arithmetic=form), folder)[0], name=f"ours, {form}")
            for form in ("exact", "fast")
        ]
        report_one_by_one(report, "Steps in both forms", forms, sizes[-1], turn_bytes, bound, budget["arithmetic"])

    def larger() -> None:
        ours, peers = contestants(replace(request, shape="tiny" if small else "4B"), folder)
        rival = next(peer for peer in peers if peer.request.way == "fsdp2")
        report_one_by_one(
            report, f"Tokens a second of {ours.request.shape}", [ours, rival], sizes[0], turn_bytes, bound, budget["4B"]
        )

    def cards() -> None:
        first = spec.partition(":")[0]
        there = torch.accelerator.device_count() if on_card else 2
        ours = []
        for count in (count for count in (1, 2, 4, 8) if count <= there):
            cap = f",memory={turn_bytes}B" if turn_bytes else ""
            devices = ",".join(f"{first}:{n}" for n in range(count)) + cap if on_card else f"virtual:{count}"
            ours.append((count, contestants(replace(request, device=devices), folder)[0]))
        report_cards(report, ours, sizes[0].tokens, turn_bytes, budget["cards"])

    def longest() -> None:
        grid, first = ([32, 4096], 32) if small else (GRID, PUBLISHED_ROW)
        capped = replace(request, grain="layer", memory_bytes=cap_bytes, device=f"{spec},memory={cap_bytes}B")
        capped = replace(capped, tokens=grid[-1], way="chain" if small else "followed")
        ours, peers = contestants(capped, folder)
        ranked = [ours, *sorted(peers, key=lambda peer: peer.request.way == "plain")]
        sides = [for_long_rows(side) for side in ranked]
        report_longest(report, sides, cap_bytes, grid, first, bound, budget["longest row"])

    def headlines() -> None:
        chosen = [headline.small() for headline in HEADLINES] if small else HEADLINES
        report_headlines(report, chosen, spec, cap_bytes if not small else 0, bound, budget["headlines"])

    parts: dict[str, Any] = {
        "checks": checks,
        "throughput": throughput,
        "arithmetic": arithmetic,
        "headlines": headlines,
        "longest row": longest,
        "4B": larger,
        "cards": cards,
        "link": lambda: report_link(report, spec, small, budget["link"]),
    }
    for part in options.parts:
        parts[part]()
    report.close()
    if not fine:
        raise SystemExit("a check failed, or there are no figures of ours that agree with the others: see the report")


if __name__ == "__main__":
    main()
