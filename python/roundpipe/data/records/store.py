"""Samples on disk: written record by record, read when they are asked for.

A folder has a token file (`docs/reference/token-files.md`) of samples, and one of runs: the lengths of the stretches
of each sample's tokens that do not count and that count, in turn, beginning with those that do not. A third file has
the number of the first sample of each record, as little-endian numbers of 8 bytes, and a fourth a byte for each sample
that is rated, 1 if it is good. For a model that takes pictures, a fifth has a line of JSON for each sample: its text,
the kinds and files of its pictures, videos and sounds and the bytes that the processor makes of them, or null if it has
no text; a sixth says where the lines begin, in 8 bytes each.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from roundpipe import _core
from roundpipe.data.conversations.tokens import Rendered
from roundpipe.data.order import Numbers
from roundpipe.data.pictures.content import Medium
from roundpipe.data.samples import IGNORED
from roundpipe.data.tokens.writer import token_file

FILES = (
    "samples.tokens", "samples.runs", "records.first", "samples.good", "samples.rendered", "samples.lines",
)  # fmt: skip
_TOKENS, _RUNS, _RECORDS, _GOOD, _RENDERED, _LINES = FILES
PICTURES = "pictures"
"""The folder of pictures that were part of records."""


@dataclass(frozen=True)
class Encoded:
    """A sample: its tokens, the lengths of stretches that do not count and that count, in turn, whether it is good, if
    that is known, and what it was made of, for a model that takes pictures."""

    tokens: list[int]
    runs: list[int]
    is_good: bool | None = None
    rendered: Rendered | None = None

    @property
    def counted(self) -> int:
        """Tokens that are predicted and whose loss counts; nothing predicts the first one."""
        return sum(self.runs[1::2]) - (self.runs[0] == 0)

    def cut(self, length: int) -> Encoded:
        """Its first tokens."""
        runs, left = [], length
        for run in self.runs:
            runs.append(min(run, left))
            left -= runs[-1]
        while len(runs) > 1 and not runs[-1]:
            runs.pop()
        return Encoded(self.tokens[:length], runs, self.is_good)


def of_labels(tokens: list[int], labels: Sequence[int]) -> Encoded:
    """A sample with labels; -100 marks those that do not count."""
    runs = [] if labels[0] == IGNORED else [0]
    runs += [sum(1 for _ in stretch) for _, stretch in itertools.groupby(labels, lambda label: label != IGNORED)]
    return Encoded(tokens, runs)


class SampleWriter:
    """Appends records; made by `sample_files`.

    Attributes:
        records: the number of records so far.
        samples: the number of samples so far.
    """

    def __init__(
        self,
        tokens: _core.TokenWriter,
        runs: _core.TokenWriter,
        firsts: BinaryIO,
        good: BinaryIO,
        rendered: tuple[BinaryIO, BinaryIO] | None,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._tokens, self._runs, self._firsts, self._good = tokens, runs, firsts, good
        self._rendered = rendered
        self.records = 0

    @property
    def samples(self) -> int:
        return self._tokens.documents

    def append(self, samples: Sequence[Encoded], begins: bool = True) -> None:
        """Appends the samples of a record, or more of them."""
        if begins:
            self._firsts.write(self.samples.to_bytes(8, "little"))
            self.records += 1
        for sample in samples:
            self._tokens.append(sample.tokens)
            self._runs.append(sample.runs)
            if sample.is_good is not None:
                self._good.write(bytes([sample.is_good]))
            if self._rendered is not None:
                lines, places = self._rendered
                places.write(lines.tell().to_bytes(8, "little"))
                lines.write(json.dumps(self._made_of(sample)).encode() + b"\n")

    def _made_of(self, sample: Encoded) -> Any:
        if sample.rendered is None:
            return None
        # The folder may move.
        own = ((kind, Path(file)) for kind, file in sample.rendered.pictures)
        within = self._folder
        files = [(kind, str(file.relative_to(within) if file.is_relative_to(within) else file)) for kind, file in own]
        return [sample.rendered.text, files, sample.rendered.size]


@contextmanager
def sample_files(folder: Path, vocabulary: int, max_length: int, rendered: bool = False) -> Iterator[SampleWriter]:
    """Gives a writer of the files of a folder; they are complete at the end. `rendered`: what samples were made of is
    written as well.

    Raises:
        ValueError: no record was appended.
        RoundPipeError: a file cannot be written.
    """
    with (
        token_file(folder / _TOKENS, vocabulary) as tokens,
        token_file(folder / _RUNS, max_length + 1) as runs,
        open(folder / _RECORDS, "wb") as firsts,
        open(folder / _GOOD, "wb") as good,
        ExitStack() as more,
    ):
        both = [more.enter_context(open(folder / name, "wb")) for name in (_RENDERED, _LINES) if rendered]
        yield SampleWriter(tokens, runs, firsts, good, (both[0], both[1]) if rendered else None, folder)


class SampleFiles:
    """The files of a folder. Samples are read when they are asked for.

    Args:
        folder: that `sample_files` wrote.
        pairs: whether two samples that were appended are one: a chosen and a rejected answer.

    Raises:
        ValueError: a file is not there, or does not belong to the others.
        RoundPipeError: a file cannot be read, or is cut or damaged.
    """

    def __init__(self, folder: Path, pairs: bool) -> None:
        self._folder = folder
        self._tokens = _core.TokenFile(str(folder / _TOKENS))
        self._runs = _core.TokenFile(str(folder / _RUNS))
        self.pairs = pairs
        try:
            self._firsts = np.memmap(folder / _RECORDS, dtype="<u8", mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"[data] cannot read {folder / _RECORDS}: {error}; prepare the data again") from None
        self._good, self._rendered = _bytes_of(folder / _GOOD), _bytes_of(folder / _RENDERED)
        self._lines = _bytes_of(folder / _LINES).view("<u8")
        fits = self._runs.documents == self._tokens.documents and len(self._good) in (0, self._tokens.documents)
        if not fits or int(self._firsts[-1]) > self._tokens.documents:
            raise ValueError(f"[data] the files of {folder} do not belong together; prepare the data again")

    def __len__(self) -> int:
        return self._tokens.documents // (2 if self.pairs else 1)

    @property
    def records(self) -> int:
        return len(self._firsts)

    @property
    def checksum(self) -> str:
        """Differs if any token, label or rating does."""
        return f"{self._tokens.checksum:08x}{self._runs.checksum:08x}" + (
            f"{zlib.crc32(self._good.tobytes()):08x}" if len(self._good) else ""
        )

    def largest_token(self, most: int) -> int:
        """The largest token, if the files may hold one above `most`; else -1. Reads all tokens then."""
        return self._tokens.largest() if self._tokens.vocabulary > most + 1 else -1

    def samples_of(self, records: Numbers) -> Numbers:
        """The numbers of the samples of these records, in this order."""
        if self.pairs:
            return records
        begins = self._firsts[records].astype(np.int64)
        last = records + 1 == self.records
        ends = np.where(last, len(self), self._firsts[np.where(last, 0, records + 1)]).astype(np.int64)
        counts = ends - begins
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        samples: Numbers = np.repeat(begins, counts) + offsets
        return samples

    def lengths(self, samples: Numbers) -> Numbers:
        """Tokens of these samples; of a pair, both answers' together."""
        if self.pairs:
            return self._tokens.lengths(2 * samples) + self._tokens.lengths(2 * samples + 1)
        return self._tokens.lengths(samples)

    def sample(self, number: int) -> dict[str, Any]:
        """A sample's `input_ids` and `labels`, `is_good` if it is rated, and `text`, `pictures` and `picture_bytes` for
        a model that takes pictures; of a pair, those of `chosen` and of `rejected`."""
        if self.pairs:
            return {"chosen": self._document(2 * number), "rejected": self._document(2 * number + 1)}
        rating: dict[str, Any] = {"is_good": bool(self._good[number])} if len(self._good) else {}
        return self._document(number) | rating | self._made_of(number)

    def _made_of(self, number: int) -> dict[str, Any]:
        """What a sample was made of for a model that takes pictures; empty without a text."""
        if not len(self._lines):
            return {}
        end = int(self._lines[number + 1]) if number + 1 < len(self._lines) else len(self._rendered)
        made = json.loads(self._rendered[int(self._lines[number]) : end].tobytes())
        if made is None:
            return {}
        text, files, size = made
        return {
            "text": text,
            "pictures": [Medium(kind, str(self._folder / file)) for kind, file in files],
            "picture_bytes": size,
        }

    def _document(self, number: int) -> dict[str, torch.Tensor]:
        tokens, runs = self._tokens.document(number), self._runs.document(number)
        counts = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        labels = np.where(counts, tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


def _bytes_of(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A file's bytes, read when they are looked at; none if it is empty or, of an older version, not there."""
    if not file.exists() or not file.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(file, dtype=np.uint8, mode="r")
