"""The end of a run: one line for each claim, with the actual result, and whether the claim holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundpipe.data.samples import IGNORED
from roundpipe.train.demo.proof import Comparison, Room

# The held-out loss of a judged run must end at least this share below ln(vocabulary).
REQUIRED_FALL = 0.4


@dataclass(frozen=True)
class Verdict:
    """One claim: `line` is printed; `complaint` says what is wrong, and is empty if the claim holds."""

    line: str
    complaint: str = ""


@dataclass(frozen=True)
class Guessing:
    """The results of guessing without a model: losses in nats per token, shares of the held-out tokens.

    Attributes:
        uniform_loss: loss of equal probabilities for all tokens: ln(vocabulary).
        frequency_loss: loss of each token's frequency in the training text, regardless of context.
        most_frequent_share: how many tokens are right if the training text's most frequent one is guessed always.
    """

    uniform_loss: float
    frequency_loss: float
    most_frequent_share: float


def predicted(batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens of a batch of padded rows that a model predicts: int64 [tokens]."""
    labels = batch["labels"][:, 1:]
    return labels[labels != IGNORED]


def guess(training: Iterable[Mapping[str, Tensor]], held_out: Iterable[Mapping[str, Tensor]], size: int) -> Guessing:
    """Guesses the tokens of `held_out` from the counts of those in `training`, of a vocabulary of a size.

    Each count is increased by one, so that tokens that were never seen have a probability.
    """
    labels = torch.cat([predicted(batch) for batch in held_out])
    counts = torch.bincount(torch.cat([predicted(batch) for batch in training]), minlength=size)
    log_probabilities = (counts + 1).double().log() - math.log(int(counts.sum()) + size)
    return Guessing(
        uniform_loss=math.log(size),
        frequency_loss=-float(log_probabilities[labels].mean()),
        most_frequent_share=float((labels == counts.argmax()).double().mean()),
    )


def right_share(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """The share of tokens to which a model of transformers gives the highest probability."""
    right = tokens = 0
    with torch.inference_mode():
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            right += int((logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum())  # never IGNORED, a negative
            tokens += len(predicted(batch))
    return right / tokens


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def fits(room: Room, metrics: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compares the plain loop's memory with the pipeline's peak on its fullest device, in the lines of a training."""
    peak_bytes = max(line["device_bytes"] for line in metrics if "device_bytes" in line)
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


def learns(metrics: Sequence[Mapping[str, Any]], share: float, guessing: Guessing, is_judged: bool) -> Verdict:
    """The held-out loss before and after, in the lines of a training, and the share of tokens that are right after it.

    Judges only a run with known settings.
    """
    losses = [line["evaluation_loss"] for line in metrics if "evaluation_loss" in line]
    first, last = (math.nan if loss is None else loss for loss in (losses[0], losses[-1]))
    line = (
        f"LEARNS  held-out loss {first:.2f} -> {last:.2f} (guessing by frequency {guessing.frequency_loss:.2f}); next "
        f"token right {share:.1%} (guessing {guessing.most_frequent_share:.1%})"
    )
    required = guessing.uniform_loss * (1 - REQUIRED_FALL)
    if not is_judged or (last <= required and share > guessing.most_frequent_share):
        return Verdict(line)
    return Verdict(
        line.replace("LEARNS  ", "LEARNS  no: ", 1),
        f"[demo] the held-out loss ended at {last:.3f} with {share:.1%} of the tokens right; expected at most "
        f"{required:.3f} and more than {guessing.most_frequent_share:.1%}; the pipeline or the settings are at fault, "
        "please report this run",
    )
