"""Writes a model folder atomically: it is complete or does not exist."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe.files import new_folder
from roundpipe.huggingface.weights.files import INDEX_FILE, Checkpoint

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and all of them."""

_ROOM = 16 << 20  # of a disk, beside what is counted


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to write: its name, safetensors' name of its dtype, its shape and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def write_safetensors(
    path: Path, metadata: Mapping[str, str], entries: Iterable[Entry], chunks: Callable[[str], Iterator[memoryview]]
) -> None:
    """Writes one file, one tensor at a time, in the order of `entries`.

    Args:
        path: the file.
        metadata: goes into the header, with `format: pt`.
        entries: the tensors of the file.
        chunks: maps a tensor's name to its bytes, in pieces.
    """
    header: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    offset = 0
    entries = list(entries)
    for entry in entries:
        end = offset + entry.size_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for chunk in chunks(entry.name):
                file.write(chunk)
        if file.tell() != 8 + len(text) + offset:
            raise RuntimeError(f"{path} has {file.tell()} bytes, expected {8 + len(text) + offset}")
        file.flush()
        os.fsync(file.fileno())


def bytes_of_tensor(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor on the host, as stored in a file."""
    if tensor.numel():
        array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        yield memoryview(array)


def write_folder(
    out: Path,
    where: str,
    checkpoint: Checkpoint,
    entries: Mapping[str, list[Entry]],
    chunks: Callable[[str], Iterator[memoryview]],
    copies: Mapping[str, Path],
    config: Callable[[dict[str, Any]], dict[str, Any]],
    progress: Progress | None,
) -> None:
    """Writes a model's folder made of another one: whole, or not at all.

    Args:
        out: see `new_folder`.
        where: tags the messages.
        checkpoint: the files that it is made of, and whose names and metadata it gets.
        entries: the tensors of each file.
        chunks: maps a tensor's name to its bytes, in pieces.
        copies: files beside the weights, by name.
        config: changes the fields of config.json.
        progress: None: nobody looks.
    """
    weights = sum(entry.size_bytes for held in entries.values() for entry in held)
    done = 0

    def counted(name: str) -> Iterator[memoryview]:
        nonlocal done
        for chunk in chunks(name):
            yield chunk
            done += chunk.nbytes
            if progress is not None:
                progress(done, weights)

    others = sum(path.stat().st_size for path in copies.values())
    with new_folder(out, where, weights + others + _ROOM) as folder, torch.no_grad():
        for name, path in copies.items():
            shutil.copyfile(path, folder / name)
        for file in checkpoint.files:
            write_safetensors(folder / file, checkpoint.metadata[file], entries[file], counted)
        if checkpoint.index is not None:
            _write_index(folder / INDEX_FILE, checkpoint.index, entries)
        _change(folder / "config.json", config)


def _write_index(path: Path, metadata: Mapping[str, object], entries: Mapping[str, list[Entry]]) -> None:
    weight_map = {entry.name: file for file, held in entries.items() for entry in held}
    total = sum(entry.size_bytes for held in entries.values() for entry in held)
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    before = json.loads(path.read_text(encoding="utf-8"))
    after = change(dict(before))
    if after != before:
        path.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
