"""The data of a run: samples on disk, and the batches of its steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from roundpipe.data.batches import Batches
from roundpipe.data.pictures.batches import PictureBatches
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.records.prepare import DataOptions, PreparedData, open_prepared, prepare
from roundpipe.data.records.store import SampleFiles
from roundpipe.data.records.summary import DataSummary
from roundpipe.data.samples import SampleStore
from roundpipe.data.tokenizer import padding_token_id
from roundpipe.train.config import TrainConfig
from roundpipe.train.nodes import RunNodes
from roundpipe.train.tasks.samples import PairBatches, PairSamples, RatedBatches, RatedSamples

# A run of so many steps reads the data again and again; an epoch has at least one step.
_ENDLESS = 1_000_000_000


@dataclass(frozen=True)
class RunData:
    """Batches of a run.

    Attributes:
        train: of the steps; remembers its position.
        held_out: of an evaluation; empty without held-out data.
        samples: that the batches of steps are made of.
        held_out_samples: that those of an evaluation are made of.
        kind: the class of the batches, and `sizes` its arguments, but for epochs and seed.
        steps: the number of steps.
        summary: what was read, for reports.
        outdated: whether a run that goes on has samples of data that has changed since.
    """

    train: Batches
    held_out: Batches | list[Any]
    samples: SampleStore
    held_out_samples: SampleStore
    kind: type[Batches]
    sizes: dict[str, Any]
    steps: int
    summary: DataSummary
    outdated: bool


def check_vocabulary(model: Any, folder: Path) -> None:
    """Raises ValueError if the samples in a folder hold a token that the model's embedding has no row for."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = SampleFiles(folder, pairs=False).largest_token(rows - 1)
    if largest >= rows:
        raise ValueError(
            f"[train] the data has the token {largest}, and the model's embedding has {rows} rows, expected more; call "
            f"resize_token_embeddings({largest + 1}) on the model and save it, or take its own tokenizer"
        )


def read_data(
    config: TrainConfig,
    tokenizer: Any,
    folder: Path,
    nodes: RunNodes,
    goes_on: bool = False,
    pictures: PictureProcessor | None = None,
) -> RunData:
    """Reads and tokenizes the data of a run into a folder, or opens what is there already: for a run that goes on, also
    if the data has changed since. Rank 0 reads, and the other nodes open what it has written. Collective.

    Raises:
        ValueError: a source is missing, there is nothing to learn from, the tokenizer has no token to pad with, or the
            nodes do not see one folder.
    """
    options = DataOptions(
        max_length=config.length,
        format=config.record_format,
        fields=tuple(config.fields or ()),
        held_out=config.held_out,
        overlong=config.overlong,
        train_on=config.train_on,
        documents=config.documents,
        ends=config.ends,
        on_bad=config.on_bad,
        seed=config.seed,
    )
    opened: list[PreparedData] = []

    def prepared() -> list[str]:
        opened.append(_prepared(config, tokenizer, options, folder, goes_on, pictures))
        return [str(weight) for weight in opened[0].weights]

    weights = nodes.first(prepared)

    def identity() -> str:
        if not opened:
            opened.append(open_prepared(folder, [Fraction(weight) for weight in weights], options))
        return opened[0].train.identity

    if len(set(nodes.each(identity))) > 1:
        raise ValueError(
            f"[train] the nodes find different samples in {folder}, expected those that rank 0 has written; --out must "
            "be one folder, on a file system that all nodes see"
        )
    found = opened[0]
    if found.summary.pairs and config.task == "sft":
        raise ValueError(
            f"[train] {', '.join(config.data or ())} has preference pairs, expected texts or conversations, whose "
            "tokens are learnt; train on pairs with --task dpo or --task reward, or give other data"
        )
    kind, samples, held = _compared(config.task, found)
    others = [source.name for source in found.summary.sources if source.format in ("text", "tokens")]
    if found.summary.pictures and others:
        raise ValueError(
            f"[train] {', '.join(others)} has texts or tokens, and other data has pictures, expected conversations "
            "alone; leave one of them out"
        )
    if found.summary.pairs and config.tokens_of_step < 2 * config.length and nodes.is_first:
        print(
            f"[train] a step has {config.tokens_of_step} tokens, and a pair may have {2 * config.length}, twice "
            "--length: a step has as many",
            file=sys.stderr,
        )
    sizes: dict[str, Any] = {
        # Of a pair, both rows have to fit.
        "batch_tokens": max(config.tokens_of_step, 2 * config.length if found.summary.pairs else 0),
        "max_length": config.length,
        "packed": config.packed,
        "pad_token_id": padding_token_id(tokenizer),
    }
    if pictures is not None:
        sizes["packed"] = False
    if pictures is not None and found.summary.pictures:
        kind = PictureBatches
        sizes["pictures"] = pictures
        del sizes["packed"]
    epochs = config.epochs if config.steps is None else _ENDLESS
    train = kind(samples, epochs=epochs, seed=None if config.in_order else config.seed, **sizes)
    steps = len(train) if config.steps is None else config.steps
    held_out: Batches | list[Any] = kind(held, **sizes) if len(held) else []
    return RunData(train, held_out, samples, held, kind, sizes, steps, found.summary, found.outdated)


def _compared(task: str, found: PreparedData) -> tuple[type[Batches], SampleStore, SampleStore]:
    """The batches of a task, and its samples for training and held out."""
    if task == "sft":
        return Batches, found.train, found.held_out
    if task != "kto":
        return PairBatches, PairSamples(found.train), PairSamples(found.held_out)
    if found.summary.records - found.summary.held_out_records < 2:
        raise ValueError(
            "[train] the data has one record to train on, expected several: kto compares with answers to other "
            "questions; give more data"
        )
    return RatedBatches, RatedSamples(found.train), RatedSamples(found.held_out, found.train)


def _prepared(
    config: TrainConfig,
    tokenizer: Any,
    options: DataOptions,
    folder: Path,
    goes_on: bool,
    pictures: PictureProcessor | None,
) -> PreparedData:
    assert config.data
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("reading the data", total=None)
        return prepare(
            config.data,
            tokenizer,
            options,
            folder,
            lambda done: bar.update(task, description=f"{done.read:,} records, {done.tokens:,} tokens"),
            keep=goes_on,
            pictures=pictures,
        )
