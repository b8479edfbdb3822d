"""Writes a model folder atomically: it is complete or does not exist."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_COPY_BYTES = 8 << 20


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


def bytes_of_file(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """Yields part of a file, in pieces."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            piece = file.read(min(_COPY_BYTES, end - start))
            if not piece:
                raise ValueError(f"[export] {path} ended at byte {start}, expected {end}; fetch it again")
            start += len(piece)
            yield memoryview(piece)


def bytes_of_tensor(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor on the host, as stored in a file."""
    if tensor.numel():
        array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        yield memoryview(array)
