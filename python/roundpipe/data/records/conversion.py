"""Reads sources, and writes the samples that their records become."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.pictures.files import PictureFiles
from roundpipe.data.records.collect import Collector
from roundpipe.data.records.encode import Encoder
from roundpipe.data.records.formats import (
    Graded,
    Item,
    Pair,
    Text,
    advice,
    format_of,
    is_bad,
    item_of,
    leaves_out_more,
    names_of,
)
from roundpipe.data.records.options import DataOptions, Format
from roundpipe.data.records.reading import Record, is_utf16
from roundpipe.data.records.sources import Source
from roundpipe.data.records.store import PICTURES, sample_files
from roundpipe.data.records.summary import DataSummary, SourceSummary
from roundpipe.data.tokens.texts import Dropped
from roundpipe.data.unusable import UnusableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roundpipe.data.pictures.processor import PictureProcessor

_AT_A_TIME = 256
_LOOKED_AT = 32  # records, to tell the format
_CHARACTERS_AT_A_TIME = 1 << 19


@dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Attributes:
        source: the one that is read.
        read: records of all sources so far.
        samples: written so far.
        tokens: of these samples.
    """

    source: str
    read: int
    samples: int
    tokens: int


class _Refused(Dropped):
    """Ends the preparation at the first thing that would be left out."""

    def note(self, reason: str, where: str) -> None:
        raise ValueError(f"[data] {where}: {reason}; mend the record, or let such records be counted and left out")


def convert(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    folder: Path,
    progress: Callable[[Progress], None] | None,
    pictures: PictureProcessor | None = None,
) -> DataSummary:
    """Writes the samples of all sources to a folder, and says what became of the records.

    Args:
        pictures: of a model that takes pictures.

    Raises:
        ValueError: as `prepare`.
    """
    summary = DataSummary()
    encoder = Encoder(tokenizer, options, pictures)
    files = PictureFiles(folder / PICTURES)
    with sample_files(folder, len(tokenizer), options.max_length, pictures is not None) as writer:
        collector = Collector(writer, tokenizer, summary)
        for source in sources:
            counts = _counts_of(source, options)
            summary.sources.append(counts)
            for batch in _batches(_items(source, counts, options, files)):
                _write(batch, encoder, collector, summary)
                if progress is not None:
                    progress(Progress(source.name, collector.read, writer.samples, collector.tokens))
        collector.finish()
        if not summary.records:
            raise ValueError(f"[data] nothing usable is left, expected at least one record\n{summary}")
    return summary


def _counts_of(source: Source, options: DataOptions) -> SourceSummary:
    counts = SourceSummary(source.name, float(source.weight))
    if options.on_bad == "error":
        counts.broken, counts.empty = _Refused(), _Refused()
    if options.overlong == "error":
        counts.overlong = _Refused()
    for file in source.left_out:
        counts.notes.note("not a file of data", str(file))
    for file in source.files:
        if is_utf16(file):
            counts.notes.note("UTF-16, and read as such", str(file))
    return counts


def _items(
    source: Source, counts: SourceSummary, options: DataOptions, files: PictureFiles
) -> Iterator[tuple[Record, Item]]:
    """The source's records that are what its format says; the others are noted."""

    def note(reason: str, where: str) -> None:
        counts.read += 1
        counts.broken.note(reason, where)

    used: set[str] = set()
    records: Iterator[Record] = (
        _renamed(record, options.renamed, used) for record in source.records(options.documents == "line", note)
    )
    form: Format | None = None if options.format == "auto" else options.format
    if form is None:
        seen = list(_first(records))
        form = _format_of(seen)
        records = itertools.chain(seen, records)
    for record in records:
        counts.read += record.begins
        if form is None:
            names = ", ".join(sorted(map(str, record.value))) if isinstance(record.value, dict) else "none"
            reason = f"members that no format has: say what they are, such as {advice(record.value)}"
            counts.broken.note(reason, f"{record.where} (it has {names[:80]})")
            continue
        counts.format = form
        if form not in ("rated", "text", "tokens", "preference") and is_bad(record.value):
            counts.notes.note("rated as bad, and learnt all the same (--task kto tells good from bad)", record.where)
        try:
            item = item_of(record, form)
            if isinstance(item, Conversation) and item.pictures:
                beside = _file_of(record).parent if source.files else None
                item = replace(item, pictures=tuple(files.found(each, beside) for each in item.pictures))
            if leaves_out_more(record.value, item):
                counts.notes.note("input or context beside messages: left out, expected it in a message", record.where)
            yield record, item
        except UnusableError as error:
            _note(counts, error, record.where)
    for name in options.renamed.keys() - used:
        counts.notes.note(f"fields: no record has the member {options.renamed[name]} for {name}", source.name)


def _file_of(record: Record) -> Path:
    """The file of a record of a file: its place without the line."""
    file, _, line = record.where.rpartition(":")
    return Path(file if line.isdigit() else record.where)


def _first(records: Iterator[Record]) -> Iterator[Record]:
    """Enough records to tell their format: one text, or several others."""
    for record in itertools.islice(records, _LOOKED_AT):
        yield record
        if isinstance(record.value, str):
            return


def _format_of(records: Sequence[Record]) -> Format | None:
    """The format that most of the records have, or None if none has one."""
    found = Counter(form for record in records if (form := format_of(record.value, record.where)) is not None)
    return found.most_common(1)[0][0] if found else None


def _renamed(record: Record, names: Mapping[str, str], used: set[str]) -> Record:
    """The record with members by the names that the options give them, and not by others for the same."""
    if not names or not isinstance(record.value, dict):
        return record
    taken = {name: record.value[member] for name, member in names.items() if member in record.value}
    used.update(taken)
    others = {other for name in taken for other in names_of(name)}
    return Record({name: each for name, each in record.value.items() if name not in others} | taken, record.where)


def _batches(items: Iterator[tuple[Record, Item]]) -> Iterator[list[tuple[Record, Item]]]:
    batch: list[tuple[Record, Item]] = []
    characters = 0
    for record, item in items:
        batch.append((record, item))
        characters += _size(item)
        if len(batch) == _AT_A_TIME or characters >= _CHARACTERS_AT_A_TIME:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _size(item: Any) -> int:
    """About as many characters as an item has."""
    if isinstance(item, Text):
        return len(item.text)
    if isinstance(item, Pair):
        return _size(item.chosen) + _size(item.rejected)
    if isinstance(item, Graded):
        return sum(_size(talk) for talk, _ in item.answers)
    messages = getattr(item, "messages", None)
    return len(item.tokens) if messages is None else sum(len(str(message.get("content"))) for message in messages)


def _write(batch: Sequence[tuple[Record, Item]], encoder: Encoder, collector: Collector, summary: DataSummary) -> None:
    counts = summary.sources[-1]
    for (record, item), made in zip(batch, encoder.encode([item for _, item in batch]), strict=True):
        if isinstance(made, UnusableError):
            _note(counts, made, record.where)
            continue
        if made.overlong:
            counts.overlong.note(made.overlong, record.where)
        for note in made.notes:
            counts.notes.note(note, record.where)
        if any(row.rendered is not None and row.rendered.pictures for row in made.rows):
            summary.pictures += 1
        if made.rows or (record.begins and not record.ends):  # more of a long text follows
            collector.add(counts, made.rows, record, isinstance(item, Pair))


def _note(counts: SourceSummary, error: UnusableError, where: str) -> None:
    dropped = counts.empty if error.kind == "empty" else counts.broken
    detail = str(error)[:160]
    dropped.note(error.reason, f"{where} ({detail})" if detail else where)
