"""Which files a checkpoint has, and where each tensor lies in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe import _core
from roundpipe.saving.capture import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Capture, Item

_SHARD_BYTES = 5_000_000_000
STATE_FILE = "state.json"
STATE_TENSORS = "state.safetensors"
# Sections of which each rank has its own part.
_OF_RANKS = (OPTIMIZER, GRADIENTS, BUFFERS)


@dataclass(frozen=True)
class File:
    """A file with tensors.

    Attributes:
        name: in the checkpoint.
        items: its tensors.
        layout: where they lie.
    """

    name: str
    items: list[Item]
    layout: _core.SafetensorsLayout


def files_of(capture: Capture) -> Iterator[File]:
    """Lays out the files that this rank writes, the sections' tensors in shards of at most `_SHARD_BYTES`."""
    for section, items in capture.sections.items():
        is_adapter = section == WEIGHTS and capture.names.adapter is not None
        stem = "adapter_model" if is_adapter else section
        is_own = capture.size > 1 and section in _OF_RANKS and (section != BUFFERS or capture.rank > 0)
        shards = [items] if is_adapter else _shards(items)
        for index, shard in enumerate(shards, start=1):
            suffix = f"-{index:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            name = f"{stem}{suffix}.safetensors"
            yield _laid_out(_core.of_rank(name, capture.rank) if is_own else name, shard)
    for rank, _, encoder in _states_of(capture):
        values = [Item(key, tensor) for key, tensor in encoder.tensors.items()]
        if values:
            yield _laid_out(STATE_TENSORS if rank is None else _core.of_rank(STATE_TENSORS, rank), values)


def _states_of(capture: Capture) -> Iterator[tuple[int | None, dict[str, Any], _core.StateEncoder]]:
    """What this rank writes beside the sections: its rank, None for what is of all ranks; values; their tensors."""
    if capture.rank == 0:
        yield None, capture.state, capture.encoder
    if capture.size > 1:
        yield capture.rank, capture.own_state, capture.own_encoder


def _shards(items: list[Item]) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.tensor.nbytes
    return shards


def _laid_out(name: str, items: list[Item]) -> File:
    described = [(item.name, item.tensor.dtype, list(item.tensor.shape)) for item in items]
    return File(name, items, _core.lay_out_safetensors(described, {"format": "pt"}))


def texts_of(capture: Capture, files: Sequence[File]) -> dict[str, str]:
    """The contents of the small files that this rank writes, by name."""
    texts = {**capture.files, **_indexes(files)} if capture.rank == 0 else {}
    for rank, state, _ in _states_of(capture):
        texts[STATE_FILE if rank is None else _core.of_rank(STATE_FILE, rank)] = _core.state_text(state)
    return texts


def _indexes(files: Sequence[File]) -> dict[str, str]:
    """The index that transformers reads beside several shards of weights."""
    shards = [file for file in files if file.name.startswith("model-")]
    if not shards:
        return {}
    weight_map = {item.name: file.name for file in shards for item in file.items}
    total = sum(item.tensor.nbytes for file in shards for item in file.items)
    return {"model.safetensors.index.json": json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})}
