"""Writes samples, and counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roundpipe.data.records.reading import Record
from roundpipe.data.records.store import Encoded, SampleWriter
from roundpipe.data.records.summary import DataSummary, Example, SourceSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLES = 2  # of each source
_EXAMPLE_TOKENS = 400


class Collector:
    """Writes samples, and keeps the summary of all of them.

    Args:
        writer: of the samples' files.
        tokenizer: shows examples as text.
        summary: gets the counts.
    """

    def __init__(self, writer: SampleWriter, tokenizer: PreTrainedTokenizerBase, summary: DataSummary) -> None:
        self._writer, self._tokenizer, self._summary = writer, tokenizer, summary
        self._lengths: Counter[int] = Counter()
        self._shown: Counter[int] = Counter()

    @property
    def read(self) -> int:
        """Records of all sources so far."""
        return sum(source.read for source in self._summary.sources)

    @property
    def tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(source.tokens for source in self._summary.sources)

    def add(self, source: SourceSummary, rows: Sequence[Encoded], record: Record, pair: bool) -> None:
        """Writes the samples of a record, or more of them.

        Raises:
            ValueError: it is a pair and those before are none, or the other way round.
        """
        summary = self._summary
        if summary.records and pair != summary.pairs:
            raise ValueError(
                f"[data] {record.where} is {'a' if pair else 'no'} preference pair, and records before it are "
                f"{'none' if pair else 'pairs'}; expected one kind: prepare them apart"
            )
        if record.begins:
            summary.pairs = pair
            source.used += 1
            summary.records += 1
            self._show(rows, record.where)
        self._writer.append(rows, record.begins)
        unknown = self._tokenizer.unk_token_id
        for row in rows:
            source.tokens += len(row.tokens)
            source.counted += row.counted
            summary.longest = max(summary.longest, len(row.tokens))
            if row.is_good is not None:
                summary.rated = True
                summary.good += row.is_good
            self._lengths[1 << (len(row.tokens) - 1).bit_length()] += 1
            if unknown is not None and unknown != self._tokenizer.eos_token_id:
                summary.unknown += row.tokens.count(unknown)
        source.samples += 1 if pair else len(rows)

    def finish(self) -> None:
        """Sums up the sources."""
        summary = self._summary
        summary.samples = sum(source.samples for source in summary.sources)
        summary.tokens = self.tokens
        summary.counted = sum(source.counted for source in summary.sources)
        summary.lengths = sorted(self._lengths.items())

    def _show(self, rows: Sequence[Encoded], where: str) -> None:
        source = len(self._summary.sources)
        if self._shown[source] >= _EXAMPLES:
            return
        self._shown[source] += 1
        for row in rows[: 2 if self._summary.pairs else 1]:
            pieces, begin = [], 0
            rating = "" if row.is_good is None else ", good" if row.is_good else ", bad"
            short = row.cut(_EXAMPLE_TOKENS)
            for number, run in enumerate(short.runs):
                if run:
                    text = self._tokenizer.decode(short.tokens[begin : begin + run])
                    pieces.append((str(text), number % 2 == 1))
                begin += run
            self._summary.examples.append(Example(where + rating, pieces))
