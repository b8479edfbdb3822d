"""The end of a run: one line for each claim, with the actual result, and whether the claim holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.demo.guessing import Guessing
from roundpipe.demo.options import DemoOptions
from roundpipe.demo.proof import Comparison, Room
from roundpipe.demo.training import EvaluationRecord


@dataclass(frozen=True)
class Verdict:
    """One claim: `line` is printed; `complaint` says what is wrong, and is empty if the claim holds."""

    line: str
    complaint: str = ""


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def fits(room: Room, peak_bytes: int) -> Verdict:
    """Compares the plain loop's memory with the pipeline's peak on its fullest device while it trained."""
    ours = f"RoundPipe trained in {mebibytes(peak_bytes)} a device at most"
    if not room.limit_bytes:
        return Verdict(f"FITS    not shown, as these devices have no limit of their own; {ours}")
    limit = f"{mebibytes(room.limit_bytes)} a device"
    if not room.is_refused:
        return Verdict(f"FITS    the plain loop fits as well, in {limit}; {ours}")
    return Verdict(f"FITS    the plain loop needs {mebibytes(room.needed_bytes)} and was refused at {limit}; {ours}")


def exact(comparisons: Sequence[Comparison]) -> Verdict:
    """Whether all `comparisons` found equal bits."""
    wrong = [one for one in comparisons if not one.is_exact]
    if not wrong:
        where = " and on ".join(one.devices for one in comparisons)
        return Verdict(f"EXACT   three steps gave the bits of the loop written by hand, on {where}")
    worst = wrong[0]
    return Verdict(
        f"EXACT   no: on {worst.devices}, {worst.differing:,} of {worst.numbers:,} numbers differ from the loop "
        f"written by hand, by {worst.largest:.3g} at most",
        f"[demo] three steps on {worst.devices} do not have the bits of the loop written by hand: the largest "
        f"difference is {worst.largest:.3g}, in {worst.where}; expected none; please report this, with the processor's "
        "name",
    )


def learns(first: EvaluationRecord, last: EvaluationRecord, guessing: Guessing, options: DemoOptions) -> Verdict:
    """Held-out loss and accuracy before and after. Judges only a run with known settings."""
    line = (
        f"LEARNS  held-out loss {first.held_out_loss:.2f} -> {last.held_out_loss:.2f} (guessing by frequency "
        f"{guessing.frequency_loss:.2f}); next token right {last.held_out_accuracy:.1%} (guessing "
        f"{guessing.most_frequent_accuracy:.1%})"
    )
    required = required_loss(guessing, options)
    if not options.is_judged:
        return Verdict(line)
    if last.held_out_loss <= required and last.held_out_accuracy > guessing.most_frequent_accuracy:
        return Verdict(line)
    return Verdict(
        line.replace("LEARNS  ", "LEARNS  no: ", 1),
        f"[demo] the held-out loss ended at {last.held_out_loss:.3f} with {last.held_out_accuracy:.1%} of the tokens "
        f"right; expected at most {required:.3f} and more than {guessing.most_frequent_accuracy:.1%}; the pipeline or "
        "the settings are at fault, please report this run",
    )


def required_loss(guessing: Guessing, options: DemoOptions) -> float:
    """The held-out loss that a judged run must reach, in nats per token."""
    return guessing.uniform_loss * (1 - options.required_fall)
