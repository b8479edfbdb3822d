"""Where records come from: files, folders, data sets by name, objects; and how often they are to appear."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from roundpipe.data.records.extra import imported
from roundpipe.data.records.reading import Note, Record, is_data, records_of, without_nulls
from roundpipe.data.tokens.texts import files_of, first_repeated, identity_of

_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Source:
    """One source, as it was given.

    Attributes:
        name: for messages.
        weight: how often its records appear in an epoch.
        files: those it has, or none if `dataset` is given.
        dataset: an object of `datasets`, or any iterable of records.
        left_out: files of a folder that are no data.
    """

    name: str
    weight: Fraction = Fraction(1)
    files: tuple[Path, ...] = ()
    dataset: Any = None
    left_out: tuple[Path, ...] = ()

    def records(self, lines: bool, note: Note) -> Iterator[Record]:
        """Its records, one at a time; `note` gets what cannot be read: the reason, and the place."""
        if self.dataset is None:
            for file in self.files:
                yield from records_of(file, lines, note)
            return
        for row, value in enumerate(self.dataset, start=1):
            yield Record(without_nulls(value) if _of_datasets(self.dataset) else value, f"{self.name}:{row}")

    def state(self) -> Any:
        """What it is now: names, sizes and times of files; of a data set, its fingerprint. None if nothing tells."""
        if self.dataset is None:
            stats = [(str(file.resolve()), file.stat()) for file in self.files]
            return [[name, found.st_size, found.st_mtime_ns] for name, found in stats]
        return _mark(self.dataset)

    def identities(self) -> Iterator[tuple[Hashable, str]]:
        """What each of its files is, whatever path leads there, or its data set; with a name for messages."""
        if self.dataset is not None:
            yield _mark(self.dataset) or id(self.dataset), self.name
        for file in self.files:
            yield identity_of(file), str(file)


def sources_of(given: Sequence[Any]) -> list[Source]:
    """Finds sources, each as `source_of` does.

    Raises:
        ValueError: as there; or a file or a data set is in two of them, or twice in one. A record could be held out of
            one copy and trained on in the other.
    """
    sources = [source_of(each) for each in given]
    repeated = first_repeated(
        (identity, (name, source.name)) for source in sources for identity, name in source.identities()
    )
    if repeated is not None:
        (before, _), (name, source) = repeated
        twice = f"{name} is given twice" if before == name else f"{before} and {name} are the same"
        raise ValueError(
            f"[data] {twice}, expected it once, since a record could be held out of one copy and trained on in the "
            f"other; if records are to appear more often, give their source a weight: {source}=2"
        )
    return sources


def source_of(given: Any) -> Source:
    """Finds a source.

    Args:
        given: a file, a folder, or the name of a data set on the Hub, with ":SPLIT" or ":CONFIGURATION:SPLIT" behind it
            and "train" without it; each also with "=WEIGHT" behind it. A folder may have a split, too, if `datasets`
            reads it. An object of `datasets` or an iterable of
            records; in a pair with its weight, if it has one.

    Raises:
        ValueError: there is no such source, or the weight is no positive number.
    """
    weight: Any = 1
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[1], Mapping):
        given, weight = given
    if not isinstance(given, str | os.PathLike):
        if not hasattr(given, "__iter__"):
            raise ValueError(f"[data] a source is a {type(given).__name__}, expected a path, a name, or records")
        return Source(type(given).__name__, _weight(weight, type(given).__name__), dataset=_one_split(given))
    text = os.fspath(given)
    if not Path(text).exists() and "=" in text:
        text, _, weight = text.rpartition("=")
    share = _weight(weight, text)
    path = Path(text)
    if _saved(path):
        return Source(text, share, dataset=_one_split(_loaded_from_disk(path)))
    if path.exists():
        found = files_of([path], "data")
        taken = tuple(file for file in found if path.is_file() or is_data(file))
        if not taken:
            raise ValueError(
                f"[data] {text} has no files of data, expected .jsonl, .json, .parquet, .csv, .tsv or .txt"
            )
        return Source(text, share, taken, left_out=tuple(file for file in found if file not in set(taken)))
    name, *rest = text.split(":")
    folder = Path(name).is_dir()
    if not folder and (text.startswith((".", "/", "~")) or text.count("/") > 1 or is_data(path) or "=" in text):
        raise ValueError(f"[data] {text} is not there, expected a file, a folder, or the name of a data set on the Hub")
    if len(rest) > 2 or not all([name, *rest]):
        raise ValueError(f"[data] {text!r} names no data set, expected NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT")
    if _saved(Path(name)):
        return Source(text, share, dataset=_split_of(_loaded_from_disk(Path(name)), rest[-1], text))
    return Source(text, share, dataset=_named(text, name, rest))


def _weight(weight: Any, name: str) -> Fraction:
    try:
        found = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if found <= 0:
        raise ValueError(
            f"[data] {name} has the weight {weight!r}, expected a number above 0: how often its records appear in an "
            "epoch; leave the source out if they should not"
        )
    return found


def _saved(path: Path) -> bool:
    """Whether save_to_disk of datasets wrote this folder."""
    return path.is_dir() and any((path / name).is_file() for name in _SAVED)


def _loaded_from_disk(path: Path) -> Any:
    return imported("datasets", f"to read {path}, which save_to_disk wrote").load_from_disk(str(path))


def _named(text: str, name: str, rest: list[str]) -> Any:
    datasets = imported("datasets", f"to load {text}, which is no file or folder here")
    split = rest[-1] if rest else "train"
    try:
        return datasets.load_dataset(name, rest[0] if len(rest) == 2 else None, split=split)
    except Exception as error:  # whatever a data set on the Hub raises
        raise ValueError(
            f"[data] datasets cannot load {text}: {str(error)[:300]}; expected a file, a folder, or the name of a data "
            "set on the Hub or in the local cache"
        ) from error


def _split_of(dataset: Any, split: str, text: str) -> Any:
    if not isinstance(dataset, Mapping) or split not in dataset:
        splits = ", ".join(dataset) if isinstance(dataset, Mapping) else "none"
        raise ValueError(f"[data] {text} is not there, expected one of its splits: {splits}")
    return dataset[split]


def _one_split(dataset: Any) -> Any:
    """Of several splits, the one to train on."""
    if isinstance(dataset, Mapping):
        if "train" not in dataset and len(dataset) != 1:
            raise ValueError(f"[data] the data set has the splits {', '.join(dataset)}, expected one; choose it")
        return dataset["train"] if "train" in dataset else next(iter(dataset.values()))
    return dataset


def _mark(dataset: Any) -> str | None:
    """What `datasets` tells contents apart by; None for other objects, and for streams."""
    mark = getattr(dataset, "_fingerprint", None) if _of_datasets(dataset) else None
    return mark if isinstance(mark, str) else None


def _of_datasets(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"
