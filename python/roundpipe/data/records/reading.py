"""Reads records from files, one at a time, and notes what cannot be read. Memory does not grow with the files."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from roundpipe.data.records.extra import imported
from roundpipe.data.records.json_values import json_values
from roundpipe.data.tokens.texts import decoded_lines, json_lines

Note = Callable[[str, str], None]

_RECORDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_TEXTS = (".txt", ".text")
_PIECE_CHARACTERS = 1 << 20  # a longer text is tokenized in pieces that end with a line
_LONGEST_CELL = 1 << 26
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class Record:
    """A record, or a text.

    Attributes:
        value: what a file of records holds, or a text.
        where: its file, and its line if the file has several; of Parquet and datasets, the row, from 1.
        begins: whether a text begins here; a long one is read in pieces.
        ends: whether it ends here.
    """

    value: Any
    where: str
    begins: bool = True
    ends: bool = True


def kind_of(path: Path) -> str:
    """How a file is read: "lines", "json", "parquet", "csv", or "text" if its name says nothing else."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return _RECORDS.get(suffixes[-1], "text") if suffixes else "text"


def is_data(path: Path) -> bool:
    """Whether a file that lies in a folder is taken: records, and texts that are called so."""
    name = path.name.lower().removesuffix(".gz")
    return kind_of(path) != "text" or name.endswith(_TEXTS)


def records_of(path: Path, lines: bool, note: Note) -> Iterator[Record]:
    """Yields the records of a file.

    Args:
        path: the file, also compressed (`.gz`), but for Parquet.
        lines: whether each line of a text file is a text of its own.
        note: gets what cannot be read: the reason, and the place.

    Raises:
        ValueError: the file is not there, or Parquet needs a package that is missing.
    """
    kind = kind_of(path)
    try:
        if kind == "parquet":
            yield from _parquet(path, note)
            return
        with _opened(path) as file:
            if kind == "lines" and not _begins_a_list(file):
                for where, value in json_lines(file, str(path), note):
                    yield from _of_line(value, where)
            elif kind in ("lines", "json"):
                yield from _json(path, file, note)
            elif kind == "csv":
                yield from _csv(path, file, note)
            elif lines:
                yield from (Record(line, where) for where, line in decoded_lines(file, str(path), note))
            else:
                yield from _text(path, file, note)
    except UnicodeDecodeError:
        note("not UTF-16, as its beginning says", str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        note("a damaged gzip file", f"{path} ({error})")
    except OSError as error:
        raise ValueError(f"[data] cannot read {path}: {error.strerror}") from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of the file in UTF-8, or as they are."""
    with _uncompressed(path) as file:
        first = file.read(2)
        file.seek(0)
        if first not in _UTF_16:
            yield file
            return
        with tempfile.TemporaryFile() as recoded, io.TextIOWrapper(file, encoding="utf-16", newline="") as text:
            while piece := text.read(_PIECE_CHARACTERS):
                recoded.write(piece.encode(errors="surrogatepass"))
            recoded.seek(0)
            yield cast(IO[bytes], recoded)


def _uncompressed(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else open(path, "rb")


def is_utf16(path: Path) -> bool:
    """Whether a file of text says at its beginning that it is UTF-16, as which it is read."""
    if kind_of(path) == "parquet":
        return False
    try:
        with _uncompressed(path) as file:
            return file.read(2) in _UTF_16
    except (EOFError, OSError, zlib.error):
        return False  # which reading it will say


def _begins_a_list(file: IO[bytes]) -> bool:
    """Whether a file that is called one of lines is one list over several lines. It stays at its beginning."""
    first = file.readline().decode("utf-8-sig", errors="replace").strip()
    while first == "" and (line := file.readline()):
        first = line.decode(errors="replace").strip()
    file.seek(0)
    if not first.startswith("["):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False


def _of_line(value: Any, where: str) -> Iterator[Record]:
    """The records of a line: one, or the elements of a list; a list of messages is one."""
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        yield Record(value, where)
    elif all("role" in each for each in value):
        yield Record({"messages": value}, where)
    else:
        yield from (Record(each, f"{where}[{number}]") for number, each in enumerate(value))


def _json(path: Path, file: IO[bytes], note: Note) -> Iterator[Record]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        for value, line in json_values(text):
            yield Record(value, f"{path}:{line}")
    except UnicodeDecodeError:
        note("not UTF-8: the rest of the file is not read", str(path))
    except ValueError as error:
        note("not JSON: the rest of the file is not read", f"{path}:{error}")


def _csv(path: Path, file: IO[bytes], note: Note) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="", errors="surrogateescape")
    tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    rows = csv.reader(text, delimiter="\t" if tabs else ",", strict=True)
    names: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            note("not CSV", f"{path}:{line} ({error})")
            continue
        where = f"{path}:{line}"
        if not row:
            continue
        if names is None:
            names = row
            continue
        if len(row) != len(names):
            note("another number of cells than the first line", f"{where} ({len(row)}, expected {len(names)})")
        elif any("\udc80" <= letter <= "\udcff" for cell in row for letter in cell):
            note("not UTF-8", where)
        else:
            yield Record(dict(zip(names, row, strict=True)), where)


def _parquet(path: Path, note: Note) -> Iterator[Record]:
    parquet = imported("pyarrow.parquet", f"to read {path}")
    row = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_PARQUET_ROWS):
            for value in batch.to_pylist():
                row += 1
                yield Record(without_nulls(value), f"{path}:{row}")
    except (OSError, ValueError) as error:  # pyarrow's own errors are among them
        note("not Parquet: the rest of the file is not read", f"{path}:{row + 1} ({str(error)[:80]})")


def _text(path: Path, file: IO[bytes], note: Note) -> Iterator[Record]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    begins = True
    try:
        piece = text.read(_PIECE_CHARACTERS) + text.readline()
        while True:
            following = text.read(_PIECE_CHARACTERS)
            following += text.readline() if following else ""
            yield Record(piece, str(path), begins, not following)
            begins = False
            if not following:
                return
            piece = following
    except UnicodeDecodeError:
        note("not UTF-8" if begins else "not UTF-8: the rest of the file is not read", str(path))


def without_nulls(value: Any) -> Any:
    """A value of Arrow's, without the members that are null: Arrow gives each record the members of all.

    The content of a message stays, since templates tell none from a missing one.
    """
    if isinstance(value, dict):
        kept = {"content"} if "role" in value else set()
        return {name: without_nulls(each) for name, each in value.items() if each is not None or name in kept}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
