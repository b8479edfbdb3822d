"""Reads texts from files, one at a time, and notes what cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

Split = Literal["file", "line"]
Thing = TypeVar("Thing")
_RECORDS = frozenset({".jsonl", ".ndjson"})
_MOST_REASONS = 50
_SHOWN = 5  # of Dropped.places, in its text


@dataclass(frozen=True)
class Text:
    """A document's text. `where` is its file, and its line if the file has several."""

    text: str
    where: str


@dataclass
class Dropped:
    """What was left out.

    Attributes:
        reasons: how often, by reason.
        places: the first places of each reason.
        kept: how many places of each reason are kept.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    kept: int = _SHOWN

    def note(self, reason: str, where: str) -> None:
        if reason not in self.reasons and len(self.reasons) >= _MOST_REASONS:
            reason = "other reasons"
        self.reasons[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < self.kept:
            places.append(where)

    def lines(self) -> Iterator[str]:
        """How often each reason was met, and where first."""
        for reason, count in self.reasons.most_common():
            places = ", ".join(self.places[reason][:_SHOWN]) + (", ..." if count > _SHOWN else "")
            yield f"{count:,}: {reason} ({places})"

    def __str__(self) -> str:
        return "\n".join(f"dropped {line}" for line in self.lines())

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {"reasons": dict(self.reasons), "places": self.places, "kept": self.kept}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Dropped:
        """What `as_json` gave, from JSON."""
        return cls(Counter(document["reasons"]), document["places"], document["kept"])


def files_of(inputs: Sequence[Path], where: str = "tokenize") -> list[Path]:
    """The files themselves, and those of folders, sorted by name; hidden ones are left out. `where` tags messages.

    Raises:
        ValueError: an input is not there, or a folder has no files.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            if not found:
                raise ValueError(f"[{where}] {path} has no files, expected texts or JSONL files in it")
            files.extend(found)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"[{where}] {path} is not there, expected a file or a folder of texts")
    return files


def identity_of(file: Path) -> tuple[int, int]:
    """What a file is, whatever path leads there."""
    found = file.stat()
    return found.st_dev, found.st_ino


def first_repeated(identified: Iterable[tuple[Hashable, Thing]]) -> tuple[Thing, Thing] | None:
    """The first two things that have one identity; None if no two have."""
    things: dict[Hashable, Thing] = {}
    for identity, thing in identified:
        if identity in things:
            return things[identity], thing
        things[identity] = thing
    return None


def texts_of(files: Sequence[Path], name: str, split: Split, dropped: Dropped) -> Iterator[Text]:
    """Yields the documents of the files, in order. JSONL files have one for each line.

    Args:
        files: those that end in .jsonl or .ndjson hold records; all others are texts in UTF-8.
        name: of the records' member that holds the text.
        split: whether each text file is a document, or each of its lines.
        dropped: gets what is left out: lines that are no record with a text, empty texts, and files that are not UTF-8.

    Raises:
        ValueError: a file cannot be read.
    """
    for path in files:
        try:
            if path.suffix.lower() in _RECORDS:
                found = _texts_of_records(path, name, dropped)
            else:
                found = _texts_of_text(path, split, dropped)
            for text in found:
                if text.text.strip():
                    yield text
                else:
                    dropped.note("empty", text.where)
        except OSError as error:
            raise ValueError(f"[tokenize] cannot read {path}: {error.strerror}") from None


def _texts_of_text(path: Path, split: Split, dropped: Dropped) -> Iterator[Text]:
    if split == "file":
        try:
            yield Text(path.read_bytes().decode("utf-8-sig"), str(path))
        except UnicodeDecodeError:
            dropped.note("not UTF-8", str(path))
        return
    with open(path, "rb") as file:
        for where, line in decoded_lines(file, str(path), dropped.note):
            yield Text(line, where)


def decoded_lines(file: IO[bytes], name: str, note: Callable[[str, str], None]) -> Iterator[tuple[str, str]]:
    """The lines of an open file, without their ends, and where they are: its name and their number. `note` gets the
    reason and the place of those that are left out."""
    for number, raw in enumerate(file, start=1):
        where = f"{name}:{number}"
        try:
            yield where, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            note("not UTF-8", where)


def json_lines(file: IO[bytes], name: str, note: Callable[[str, str], None]) -> Iterator[tuple[str, Any]]:
    """The values of an open file with a JSON text a line, and where they are. Empty lines may stand between them.
    `note`: see `decoded_lines`."""
    for where, line in decoded_lines(file, name, note):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            note("not JSON", where)
            continue
        yield where, value


def _texts_of_records(path: Path, name: str, dropped: Dropped) -> Iterator[Text]:
    with open(path, "rb") as file:
        for where, record in json_lines(file, str(path), dropped.note):
            if not isinstance(record, dict) or name not in record:
                dropped.note(f"a record without '{name}'", where)
            elif not isinstance(record[name], str):
                dropped.note(f"'{name}' is no text", where)
            else:
                yield Text(record[name], where)
