"""Prepares data for training: reads records, makes samples of them, and keeps these on disk.

data = prepare(["chat.jsonl", "more/=0.5"], tokenizer, DataOptions(max_length=4096, held_out=0.01), Path("prepared"))
batches = Batches(data.train, batch_tokens=65536, max_length=4096, pad_token_id=0, seed=0)
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.data.records.conversion import Progress as Progress
from roundpipe.data.records.conversion import convert
from roundpipe.data.records.fingerprint import fingerprint_of
from roundpipe.data.records.options import DataOptions as DataOptions
from roundpipe.data.records.sources import sources_of
from roundpipe.data.records.store import FILES, PICTURES, SampleFiles
from roundpipe.data.records.summary import DataSummary as DataSummary
from roundpipe.data.records.views import HeldOutSamples, TrainSamples, held_out_samples
from roundpipe.data.samples import SampleStore
from roundpipe.files import new_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roundpipe.data.pictures.processor import PictureProcessor

_DESCRIPTION = "prepared.json"
_SCHEMA, _VERSION = "roundpipe-prepared-data", 1


@dataclass(frozen=True)
class PreparedData:
    """Samples on disk.

    Attributes:
        train: what is trained on; `Batches` takes it.
        held_out: samples of the records that are held out.
        summary: what was read, and what became of it.
        folder: where the samples are.
        reused: whether they were there already.
        weights: how often an epoch has the samples of each source.
        outdated: whether the sources or the tokenizer are others by now than those that the samples were made of.
    """

    train: SampleStore
    held_out: SampleStore
    summary: DataSummary
    folder: Path
    reused: bool
    weights: tuple[Fraction, ...]
    outdated: bool = False


def prepare(
    sources: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    folder: str | Path,
    progress: Callable[[Progress], None] | None = None,
    keep: bool = False,
    pictures: PictureProcessor | None = None,
) -> PreparedData:
    """Reads records, makes samples of them, and writes these to a folder, whole or not at all.

    If the folder holds what the same sources, tokenizer and options were prepared to, nothing is read again. Records
    are read one after the other; memory holds a few hundred of them, and some tens of bytes for each sample.

    Args:
        sources: each a path, a name or an object, as `source_of` takes it; no file or data set is in two of them.
        tokenizer: of the model that will be trained.
        options: how records become samples.
        folder: to write; one that was prepared from something else is replaced.
        progress: called now and then.
        keep: take what the folder holds even if it was prepared from sources that have changed, so that a training
            that goes on has the samples that it began with.
        pictures: of a model that takes pictures; its tokenizer is the one above.

    Raises:
        ValueError: a source is not there, nothing usable is left, the folder holds something else, or a record is such
            that the options end the preparation.
    """
    if isinstance(sources, str | Path) or not sources:
        raise ValueError(f"[data] sources are {sources!r}, expected a list of at least one source")
    folder = Path(folder)
    found = sources_of(sources)
    weights = tuple(source.weight for source in found)
    fingerprint = fingerprint_of(found, tokenizer, options, pictures)
    if _prepared(folder):
        description = read_json(folder / _DESCRIPTION, "data", "prepared data")
        current = fingerprint is not None and _identity(description) == (_SCHEMA, _VERSION, fingerprint)
        if current or (keep and _identity(description)[:-1] == (_SCHEMA, _VERSION)):
            return dataclasses.replace(open_prepared(folder, weights, options), reused=True, outdated=not current)
        _remove(folder)
    with new_folder(folder, "data") as temporary:
        summary = convert(found, tokenizer, options, temporary, progress, pictures)
        files = SampleFiles(temporary, summary.pairs)
        summary.held_out_records, held = held_out_samples(files, summary.records, options.held_out, options.seed)
        summary.held_out_samples = len(held)
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "fingerprint": fingerprint,
            "summary": summary.as_json(),
        }
        (temporary / _DESCRIPTION).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return open_prepared(folder, weights, options)


def open_prepared(folder: str | Path, weights: Sequence[Fraction], options: DataOptions) -> PreparedData:
    """Opens what `prepare` has written, without its sources: on another machine that sees the folder.

    Args:
        folder: that was prepared.
        weights: of its sources, from `PreparedData`.
        options: that it was prepared with.

    Raises:
        ValueError: the folder holds no prepared data, or data of other sources.
        RoundPipeError: a file of it was damaged.
    """
    folder = Path(folder)
    if not _prepared(folder):
        raise ValueError(
            f"[data] {folder} has no {_DESCRIPTION}, expected a folder of prepared data; if another machine has "
            "prepared it, the folder must be on a file system that both see"
        )
    description = read_json(folder / _DESCRIPTION, "data", "prepared data")
    summary = DataSummary.from_json(description["summary"])
    files = SampleFiles(folder, summary.pairs)
    if (files.records, len(files)) != (summary.records, summary.samples):
        raise ValueError(
            f"[data] {folder} has {len(files)} samples of {files.records} records, expected {summary.samples} of "
            f"{summary.records}; remove the folder, and prepare the data again"
        )
    _, held = held_out_samples(files, summary.records, options.held_out, options.seed)
    if len(summary.sources) != len(weights):
        raise ValueError(
            f"[data] {folder} was prepared from {len(summary.sources)} sources, expected {len(weights)}; give the same "
            "ones, or another folder"
        )
    parts = [(each.samples, weight) for each, weight in zip(summary.sources, weights, strict=True)]
    return PreparedData(
        train=TrainSamples(files, summary.longest, held, parts),
        held_out=HeldOutSamples(files, summary.longest, held),
        summary=summary,
        folder=folder,
        reused=False,
        weights=tuple(weights),
    )


def _identity(description: Any) -> tuple[Any, ...]:
    return tuple(description.get(name) for name in ("schema", "version", "fingerprint"))


def _prepared(folder: Path) -> bool:
    return (folder / _DESCRIPTION).is_file()


def _remove(folder: Path) -> None:
    """Removes what was prepared, and nothing else."""
    shutil.rmtree(folder / PICTURES, ignore_errors=True)
    for name in (_DESCRIPTION, *FILES):
        (folder / name).unlink(missing_ok=True)
