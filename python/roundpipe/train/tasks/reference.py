"""What the reference of DPO and KTO says: the model before its first step. It is asked once for each sample, so that no
second copy of the model is needed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from roundpipe.data.batches import Batches
from roundpipe.files import replacing
from roundpipe.train.tasks.answers import Answers
from roundpipe.train.tasks.objective import Nodes
from roundpipe.train.tasks.samples import ComparedSamples, RatedSamples


def reference_of(
    samples: ComparedSamples, batches: Batches, objective: Answers, nodes: Nodes, say: Callable[[int], None]
) -> torch.Tensor:
    """`ComparedSamples.reference` of all samples. Collective.

    Args:
        samples: of which.
        batches: of the same samples, each once and in order.
        say: is told how many samples are done.
    """
    found: list[torch.Tensor] = []
    done = 0
    for batch in batches:
        if isinstance(samples, RatedSamples):
            parts = [_values(part, objective, nodes) for part in (batch, batch["others"])]
            found.append(torch.stack(parts, dim=1))
        else:
            found.append(_values(batch, objective, nodes).view(-1, 2))
        done += len(found[-1])
        say(done)
    return torch.cat(found)


def _values(batch: dict[str, Any], objective: Answers, nodes: Nodes) -> torch.Tensor:
    """Of a batch's rows, in fp64."""
    numbered = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    numbered["number"] = torch.arange(len(batch["input_ids"]))

    def own() -> list[tuple[int, float]]:
        rows = nodes.rows_of(numbered, objective.group)
        if rows is None:
            return []
        return list(zip(rows["number"].tolist(), objective.values(rows).tolist(), strict=True))

    values = torch.empty(len(batch["input_ids"]), dtype=torch.float64)
    for number, value in (each for told in nodes.each(own) for each in told):
        values[number] = value
    return values


def write_reference(path: Path, parts: dict[str, tuple[ComparedSamples, torch.Tensor]]) -> None:
    """Writes the references of several samples by name, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    tensors = {name: reference for name, (_, reference) in parts.items()}
    marks = {name: _mark(samples, reference) for name, (samples, reference) in parts.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, marks)


def _mark(samples: ComparedSamples, reference: torch.Tensor) -> str:
    """Of which samples it is, and of which values."""
    return f"{samples.identity} {zlib.crc32(reference.numpy().tobytes()):08x}"


def read_reference(path: Path, parts: dict[str, ComparedSamples]) -> dict[str, torch.Tensor]:
    """The references that were written for these samples.

    Raises:
        ValueError: the file cannot be read, or was written for others.
    """
    try:
        with safe_open(path, "pt") as file:
            identities, found = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"[train] {path} cannot be read: {error}; expected what the run has written before its first step, without "
            "which it cannot go on; begin anew with another --out"
        ) from None
    same = identities.keys() == found.keys() == parts.keys()
    if not same or any(identities[name] != _mark(samples, found[name]) for name, samples in parts.items()):
        raise ValueError(
            f"[train] {path} is damaged or was written for other samples, expected what the run has written; begin "
            "anew with another --out"
        )
    return found
