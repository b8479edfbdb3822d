"""The samples that are trained on and those that are held out, as sequences over one folder of samples.

Which samples an epoch has, and in which order, are pure functions of numbers: nothing is drawn, and nothing is held but
the numbers of the samples that are held out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from roundpipe import _core
from roundpipe.data.order import Numbers, fingerprint, shuffle
from roundpipe.data.records.store import SampleFiles
from roundpipe.data.samples import Order, Sample, SampleStore


def held_out_records(records: int, held_out: float, seed: int) -> Numbers:
    """The numbers of the records that are held out, ascending: the same for the same arguments.

    Args:
        records: how many there are.
        held_out: a share below 1, which is one record at least, or a number of records.
        seed: chooses them.

    Raises:
        ValueError: no record would be left to train on.
    """
    wanted = int(held_out) if held_out >= 1 else max(1, round(records * held_out)) if held_out else 0
    if wanted >= records:
        raise ValueError(
            f"[data] {wanted} of {records} records would be held out, expected at least one more to train on; lower "
            "held_out, or give more data"
        )
    return np.sort(_core.held_out_order(records, repr(seed)).at(np.arange(wanted)))


def held_out_samples(files: SampleFiles, records: int, held_out: float, seed: int) -> tuple[int, Numbers]:
    """How many records are held out, and the numbers of their samples, ascending; of one record that is several
    samples, as a long text is, the last samples.

    Raises:
        ValueError: nothing would be left to train on.
    """
    if records == 1 and 0 < held_out < 1 and len(files) > 1 and not files.pairs:
        last = min(len(files) - 1, max(1, round(len(files) * held_out)))
        return 0, np.arange(len(files) - last, len(files))
    held = held_out_records(records, held_out, seed)
    return len(held), files.samples_of(held)


class _View(SampleStore):
    def __init__(self, files: SampleFiles, longest: int, identity: str) -> None:
        self._files, self._longest, self._identity = files, longest, identity

    @property
    def longest(self) -> int:
        return self._longest

    @property
    def identity(self) -> str:
        return self._identity

    def sample(self, number: int) -> Sample:
        return self._files.sample(int(self._numbers(np.array([number]))[0]))

    def lengths(self, numbers: Numbers) -> Numbers:
        return self._files.lengths(self._numbers(numbers))

    @abstractmethod
    def _numbers(self, indices: Numbers) -> Numbers:
        """Their numbers among all samples of the files."""


class HeldOutSamples(_View):
    """The samples of held-out records, in the order that they were read in.

    Args:
        files: all samples.
        longest: tokens of the longest sample.
        held: numbers of the samples that are held out, ascending.
    """

    def __init__(self, files: SampleFiles, longest: int, held: Numbers) -> None:
        super().__init__(files, longest, f"{files.checksum} held out {fingerprint(held)}")
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def order(self, epoch: int, seed: int | None) -> Order:
        return Mixture([(len(self), Fraction(1))], epoch, seed)

    def _numbers(self, indices: Numbers) -> Numbers:
        return self._held[indices]


class TrainSamples(_View):
    """All other samples. Each source's appear in an epoch as often as its weight says.

    Args:
        files: all samples.
        longest: tokens of the longest sample.
        held: numbers of the samples that are held out, ascending.
        parts: of each source, the number of samples, held out or not, and the weight.
    """

    def __init__(self, files: SampleFiles, longest: int, held: Numbers, parts: Sequence[tuple[int, Fraction]]) -> None:
        self._before = held - np.arange(len(held))  # of each held-out sample: how many samples before it are not
        ends = np.cumsum([samples for samples, _ in parts])
        kept = np.diff(ends - np.searchsorted(held, ends), prepend=0)
        self._parts = [(int(samples), weight) for samples, (_, weight) in zip(kept, parts, strict=True)]
        weights = " ".join(f"{samples}*{weight}" for samples, weight in self._parts)
        super().__init__(files, longest, f"{files.checksum} without {fingerprint(held)} {weights}")

    def __len__(self) -> int:
        return sum(samples for samples, _ in self._parts)

    def order(self, epoch: int, seed: int | None) -> Order:
        return Mixture(self._parts, epoch, seed)

    def _numbers(self, indices: Numbers) -> Numbers:
        return indices + np.searchsorted(self._before, indices, side="right")


class Mixture:
    """The samples of one epoch.

    Each part is an endless row of its samples, shuffled anew each time that all were there. With a weight of w, an
    epoch takes the next w times as many of it as there are, so a part with a weight below 1 shows all of its samples
    before one comes again. What an epoch takes is shuffled once more.

    Args:
        parts: of each, the number of samples and the weight.
        epoch: from 0.
        seed: None leaves the samples in their order, part by part.
    """

    def __init__(self, parts: Sequence[tuple[int, Fraction]], epoch: int, seed: int | None) -> None:
        self._seed = seed
        self._sizes = np.array([samples for samples, _ in parts], dtype=np.int64)
        taken = [(int(epoch * w * n), int((epoch + 1) * w * n)) for n, w in parts]
        self._begins = np.array([begin for begin, _ in taken], dtype=np.int64)
        self._ends = np.cumsum([end - begin for begin, end in taken], dtype=np.int64)
        self._all = None if seed is None else shuffle(len(self), "epoch", seed, epoch)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at(self, positions: Numbers) -> Numbers:
        """The numbers of the samples at these positions, among those of all parts."""
        places = positions if self._all is None else self._all.at(positions)
        parts = np.searchsorted(self._ends, places, side="right")
        firsts = np.cumsum(self._sizes) - self._sizes
        along = self._begins[parts] + places - np.concatenate(([0], self._ends))[parts]
        rounds, within = np.divmod(along, self._sizes[parts])
        if self._seed is not None:
            for part, turn in np.unique(np.stack([parts, rounds]), axis=1).T.tolist():
                here = (parts == part) & (rounds == turn)
                within[here] = shuffle(int(self._sizes[part]), "part", self._seed, part, turn).at(within[here])
        numbers: Numbers = firsts[parts] + within
        return numbers
