"""Samples and batches of answers that are compared: pairs, or answers that are rated."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.data.batches import Batches
from roundpipe.data.collate import collate
from roundpipe.data.order import InOrder, Numbers
from roundpipe.data.samples import IGNORED, Order, Sample, SampleStore

PAIR = 2
"""Rows of a pair, the better answer first."""


class ComparedSamples(SampleStore):
    """Samples that are compared with what a reference model makes of them.

    Args:
        samples: that are read.

    Attributes:
        reference: [samples, 2] in fp64, the reference's log-probability of both rows of each sample; None until it is
            known. Of a pair, these are the two answers; of a rated answer, that one and `other`.
    """

    def __init__(self, samples: SampleStore) -> None:
        self._samples, self._once = samples, False
        self.reference: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        return self._samples.longest

    @property
    def identity(self) -> str:
        return self._samples.identity

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, number: int) -> Sample:
        reference = {} if self.reference is None else {"reference": self.reference[number]}
        return {**self._made(number), **reference}

    def lengths(self, numbers: Numbers) -> Numbers:
        return self._samples.lengths(numbers)

    def order(self, epoch: int, seed: int | None) -> Order:
        return InOrder(len(self)) if self._once else self._samples.order(epoch, seed)

    def once(self) -> ComparedSamples:
        """The same samples, each once in an epoch and in their order, however often an epoch of these has them."""
        copied = copy.copy(self)
        copied._once = True
        return copied

    @abstractmethod
    def _made(self, number: int) -> Sample:
        """A sample without what the reference makes of it."""


class PairSamples(ComparedSamples):
    """Pairs, each with `chosen` and `rejected`."""

    def _made(self, number: int) -> Sample:
        return self._samples[number]


class RatedSamples(ComparedSamples):
    """Answers, each with `is_good` and `other`: the same question with the answer of another sample.

    Args:
        samples: that are read.
        answers: where the other answers come from; None: from the same samples, of which there are two or more.
    """

    def __init__(self, samples: SampleStore, answers: SampleStore | None = None) -> None:
        super().__init__(samples)
        self._answers = samples if answers is None else answers

    def _made(self, number: int) -> Sample:
        # The next sample may be the other answer of a pair.
        further = min(2, len(self._answers) - 1)
        sample, other = self._samples[number], self._answers[(number + further) % len(self._answers)]
        return {**sample, "other": _answered(sample, other, self.longest)}


def _answered(asked: Sample, answered: Sample, longest: int) -> dict[str, torch.Tensor]:
    """The tokens of one sample up to the first that is learnt, and those of another from there on."""
    begins = [int((sample["labels"] != IGNORED).nonzero()[0]) for sample in (asked, answered)]
    parts = [asked["input_ids"][: begins[0]], answered["input_ids"][begins[1] :]]
    labels = [torch.full((begins[0],), IGNORED), answered["labels"][begins[1] :]]
    return {"input_ids": torch.cat(parts)[:longest], "labels": torch.cat(labels)[:longest]}


class PairBatches(Batches):
    """Padded batches of pairs: two rows for each, and `reference`, [rows], once it is known."""

    def _padded(self, samples: Sequence[Sample]) -> dict[str, Any]:
        rows = [sample[name] for sample in samples for name in ("chosen", "rejected")]
        return collate(rows, self._pad_token_id) | _references(samples, slice(None))


class RatedBatches(Batches):
    """Padded batches of rated answers: a row for each, `is_good`, [rows], and `reference`, [rows]. `others` is such a
    batch of the same questions with answers of other samples."""

    def _padded(self, samples: Sequence[Sample]) -> dict[str, Any]:
        others = collate([sample["other"] for sample in samples], self._pad_token_id)
        return {
            **collate(samples, self._pad_token_id),
            **_references(samples, slice(0, 1)),
            "is_good": torch.tensor([sample["is_good"] for sample in samples]),
            "others": {**others, **_references(samples, slice(1, 2))},
        }


def _references(samples: Sequence[Sample], rows: slice) -> dict[str, torch.Tensor]:
    if "reference" not in samples[0]:
        return {}
    return {"reference": torch.cat([sample["reference"][rows] for sample in samples])}
