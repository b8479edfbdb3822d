"""What a run needs beside its model and data before the first step: its objective, and what the reference says."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import roundpipe
from roundpipe import _core
from roundpipe.data.pictures.batches import PictureBatches
from roundpipe.model.memory.budget import DEVICE_VARIABLE, budget_of, is_unmeasured
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData
from roundpipe.train.nodes import RunNodes
from roundpipe.train.run_folder import REFERENCE_FILE, RunFolder
from roundpipe.train.tasks.answers import OBJECTIVES, AnswerOptions, Answers
from roundpipe.train.tasks.objective import NextTokens, Objective, TokensOfPictures
from roundpipe.train.tasks.reference import read_reference, reference_of, write_reference
from roundpipe.train.tasks.samples import ComparedSamples

_OF_DEVICES = ("device_memory", DEVICE_VARIABLE)


def objective_of(
    config: TrainConfig, model: roundpipe.RoundPipe, data: RunData, folder: RunFolder, nodes: RunNodes
) -> Objective:
    """The objective of a run. For DPO and KTO, the model says what the reference does, before its first step; a run
    that goes on reads it from its folder. Collective.

    Raises:
        ValueError: what the reference said is not there, or cannot be written.
    """
    if config.task == "sft":
        kind = TokensOfPictures if data.summary.pictures else NextTokens
        return kind(model, nodes, config.microbatches)
    good, bad = config.rating_weights
    options = AnswerOptions(config.microbatches, config.preference_beta, good, bad)
    objective = OBJECTIVES[config.task](model, nodes, options)
    if config.task != "reward":
        _refer(objective, data, folder, nodes)
    return objective


def require_room(config: TrainConfig, objective: Objective, data: RunData, nodes: RunNodes) -> None:
    """Predicts the memory of the batch with the largest microbatch of pictures, before the first step: later batches
    may have more of them than the first one. Nothing is predicted without a limit of devices. Collective.

    Raises:
        ValueError: a device has less memory than the batch takes, on some node.
    """
    if not isinstance(objective, TokensOfPictures) or not isinstance(data.train, PictureBatches):
        return
    train = data.train

    def predicted() -> None:
        limits = [limit for entry in roundpipe.devices().memory_report() if (limit := int(entry["limit_bytes"]))]
        budget = None if is_unmeasured(config.device_memory) else budget_of(config.device_memory, *_OF_DEVICES)
        limit = min([*limits, *([] if budget is None else [budget])], default=0)
        if not limit or is_unmeasured(config.device_memory):
            return
        count = config.microbatches or len(roundpipe.devices()) + 1
        batch, places, pictures = train.largest(count)
        found = objective.predict(batch)
        if found is None or found.needed <= limit:
            return
        parts = ", ".join(f"{name} {_core.format_bytes(size)}" for name, size in found.rows().items() if size)
        raise ValueError(
            f"[train] a microbatch of {len(places)} rows with {pictures} pictures takes "
            f"{_core.format_bytes(found.needed)} of a device (predicted: {parts}), expected at most "
            f"{_core.format_bytes(limit)}; raise --microbatches above {count}, train on smaller pictures, or lower "
            "--batch-tokens"
        )

    nodes.each(predicted)


def _refer(objective: Answers, data: RunData, folder: RunFolder, nodes: RunNodes) -> None:
    parts: dict[str, ComparedSamples] = {}
    for name, samples in (("train", data.samples), ("held_out", data.held_out_samples)):
        if isinstance(samples, ComparedSamples) and len(samples):
            parts[name] = samples
    path = folder.path / REFERENCE_FILE
    if folder.goes_on:
        found = read_reference(path, parts)
    else:
        found = {name: _asked(samples, objective, data, nodes) for name, samples in parts.items()}
        nodes.first(lambda: write_reference(path, {name: (parts[name], found[name]) for name in parts}))
    for name, samples in parts.items():
        samples.reference = found[name]


def _asked(samples: ComparedSamples, objective: Answers, data: RunData, nodes: RunNodes) -> Any:
    batches = data.kind(samples.once(), **data.sizes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not nodes.is_first) as bar:
        task = bar.add_task("asking the reference", total=len(samples))
        return reference_of(samples, batches, objective, nodes, lambda done: bar.update(task, completed=done))
