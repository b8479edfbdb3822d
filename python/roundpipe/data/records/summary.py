"""What was read, what became of it, and what could not be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from roundpipe.data.tokens.texts import Dropped

KEPT_PLACES = 100
KINDS = ("broken", "empty", "overlong")


def _dropped() -> Dropped:
    return Dropped(kept=KEPT_PLACES)


@dataclass
class SourceSummary:
    """One source.

    Attributes:
        name: as it was given.
        weight: how often its records appear in an epoch.
        format: of its records; "" if none could be used.
        read: records that were looked at.
        used: records that became samples.
        samples: what they became, held out or not.
        tokens: of these samples.
        counted: tokens that are predicted, and whose loss counts.
        broken: records that are not what they should be, by reason, with file and line of the first 100 of each.
        empty: records with nothing to learn from.
        overlong: records of more tokens than a sample may have, whether they were cut or left out.
        notes: what else became of records, for example that a chat template left something out of them.
    """

    name: str
    weight: float = 1.0
    format: str = ""
    read: int = 0
    used: int = 0
    samples: int = 0
    tokens: int = 0
    counted: int = 0
    broken: Dropped = field(default_factory=_dropped)
    empty: Dropped = field(default_factory=_dropped)
    overlong: Dropped = field(default_factory=_dropped)
    notes: Dropped = field(default_factory=_dropped)


@dataclass(frozen=True)
class Example:
    """One sample as text.

    Attributes:
        where: file and line of its record.
        pieces: its text in order, each with whether its tokens' loss counts.
    """

    where: str
    pieces: list[tuple[str, bool]]


@dataclass
class DataSummary:
    """All sources together. `as_json` and `from_json` keep it.

    Attributes:
        sources: in the order given.
        pairs: whether samples are preference pairs.
        rated: whether each sample is known to be good or bad.
        good: samples that are good, of those that are rated.
        pictures: records with pictures.
        records: that became samples.
        samples: rows of tokens that records became; a pair is one. A long text is several.
        tokens: of all samples.
        counted: tokens that are predicted, and whose loss counts.
        unknown: tokens that are the tokenizer's unknown token.
        longest: tokens of the longest sample.
        held_out_records: records that are held out.
        held_out_samples: samples of these records.
        lengths: how many samples have at most so many tokens, and more than the entry before: (tokens, samples).
        examples: a few samples as text.
    """

    sources: list[SourceSummary] = field(default_factory=list)
    pairs: bool = False
    rated: bool = False
    good: int = 0
    pictures: int = 0
    records: int = 0
    samples: int = 0
    tokens: int = 0
    counted: int = 0
    unknown: int = 0
    longest: int = 0
    held_out_records: int = 0
    held_out_samples: int = 0
    lengths: list[tuple[int, int]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    @property
    def problems(self) -> Iterator[tuple[str, str, str, int, list[str]]]:
        """What could not be used as it was: (source, kind, reason, how often, first places)."""
        for source in self.sources:
            for kind in KINDS:
                dropped: Dropped = getattr(source, kind)
                for reason, count in dropped.reasons.most_common():
                    yield source.name, kind, reason, count, dropped.places[reason]

    def __str__(self) -> str:
        """A few lines for people."""
        counts = f"{self.records:,} records, {self.samples:,} samples, {self.tokens:,} tokens, {self.counted:,} learnt"
        held = f"{self.held_out_records:,} records" if self.held_out_records else f"the last {self.held_out_samples:,}"
        counts += f", {self.good:,} good and {self.samples - self.good:,} bad" if self.rated else ""
        counts += f", {self.pictures:,} with pictures" if self.pictures else ""
        lines = [counts + (f", {held} held out" if self.held_out_samples else "")]
        for source in self.sources:
            lines.append(f"{source.name}: {source.read:,} read as {source.format or 'nothing'}, {source.used:,} used")
            for kind in (*KINDS, "notes"):
                dropped: Dropped = getattr(source, kind)
                lines.extend(f"  {kind}: {line}" for line in dropped.lines())
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Lists, numbers and texts that `from_json` takes."""
        sources = [
            {**vars(source), **{name: getattr(source, name).as_json() for name in (*KINDS, "notes")}}
            for source in self.sources
        ]
        return {**vars(self), "sources": sources, "examples": [vars(example) for example in self.examples]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> DataSummary:
        """What `as_json` gave, from JSON."""
        sources = []
        for source in document["sources"]:
            dropped = {name: Dropped.from_json(source[name]) for name in (*KINDS, "notes")}
            sources.append(SourceSummary(**{**source, **dropped}))
        examples = [
            Example(example["where"], [(text, counts) for text, counts in example["pieces"]])
            for example in document["examples"]
        ]
        lengths = [(tokens, samples) for tokens, samples in document["lengths"]]
        return cls(**{**document, "sources": sources, "examples": examples, "lengths": lengths})
