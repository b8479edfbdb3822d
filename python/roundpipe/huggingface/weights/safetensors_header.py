"""Reads and checks the header of a safetensors file, without reading the data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
"""torch's dtypes by safetensors' names."""

# The format's own limit, and the limits of torch's sizes and strides.
_MOST_HEADER_BYTES = 100_000_000
_MOST_ELEMENTS = 1 << 60
_MOST_DIMENSIONS = 64
_LFS_START = b"version https://git-lfs"
_WHOLE_FILE = "a whole safetensors file"


class CheckpointError(ValueError):
    """A model's files are missing, damaged, or belong to another model."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor. `start` and `end` are byte offsets in its file, `dtype` is safetensors' name."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Reads a file's `__metadata__`, and its tensors in the order of their bytes.

    Raises:
        CheckpointError: the file cannot be read, is a pointer of Git LFS, or does not match its header exactly: every
            byte of the data must belong to one tensor, and every tensor must have the bytes of its dtype and shape.
    """
    refuse_pointer(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= size - 8:
                raise _damaged(path, f"its header would end at byte {8 + length} of {size}")
            if length > _MOST_HEADER_BYTES:
                raise _damaged(path, f"its header would have {length} bytes, more than {_MOST_HEADER_BYTES}")
            text = stream.read(length)
    except OSError as error:
        raise _unreadable(path, error) from None
    header = parse_table(text, path, "its header", _WHOLE_FILE)
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "the __metadata__ in its header is not a table of texts")
    found = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_cover(path, found, 8 + length, size)
    return metadata, found


def parse_table(text: bytes, path: Path, what: str, expected: str) -> dict[str, Any]:
    """Parses a JSON object in which no name appears twice.

    Args:
        text: UTF-8.
        path: the file of the text.
        what: names the text in messages.
        expected: names the expected file in messages.

    Raises:
        CheckpointError: the text is not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _damaged(path, f"{what} has two entries for {twice!r}", expected)
        return table

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"{what} is not JSON ({error})", expected) from None
    if not isinstance(table, dict):
        raise _damaged(path, f"{what} is not a JSON table", expected)
    return table


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError if `path` is the pointer that Git leaves in place of a large file not yet fetched."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_START))
    except OSError as error:
        raise _unreadable(path, error) from None
    if start == _LFS_START:
        raise CheckpointError(
            f"[checkpoint] {path} is a pointer of Git LFS, expected the file itself; run `git lfs pull` in its folder"
        )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_ELEMENTS


def _stored(path: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{name!r} has no dtype, shape and data_offsets in its header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"[checkpoint] {name} in {path} has the dtype {dtype!r}, expected one of {', '.join(DTYPES)}; give a model "
            "whose weights are not quantised"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(map(_is_size, shape))
        or math.prod(max(n, 1) for n in shape) > _MOST_ELEMENTS
    ):
        raise _damaged(path, f"{name!r} has the shape {_short(shape)} in its header")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _damaged(path, f"{name!r} has the data_offsets {_short(offsets)} in its header")
    size_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size_bytes:
        raise _damaged(
            path,
            f"{name!r} has {offsets[1] - offsets[0]} bytes in its header, where {dtype} of shape {_short(shape)} "
            f"takes {size_bytes}",
        )
    return StoredTensor(path.name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _check_cover(path: Path, found: dict[str, StoredTensor], begin: int, size: int) -> None:
    """Raises CheckpointError unless the tensors are adjacent, from `begin` to the file's end."""
    end, before = begin, "its header"
    for name, tensor in found.items():
        if tensor.start < end:
            raise _damaged(path, f"{name!r} overlaps {before} by {end - tensor.start} bytes")
        if tensor.start > end:
            raise _damaged(path, f"there are {tensor.start - end} bytes between {before} and {name!r}")
        end, before = tensor.end, repr(name)
    if end != size:
        lost = next((name for name, tensor in found.items() if tensor.end > size), None)
        where = f", and ends before {lost!r} does" if lost else ""
        raise _damaged(path, f"it has {size} bytes where its header describes {end}{where}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"[checkpoint] {path} cannot be read: {error.strerror}; expected a file that this user may read"
    )


def _damaged(path: Path, what: str, expected: str = _WHOLE_FILE) -> CheckpointError:
    return CheckpointError(f"[checkpoint] {path} is damaged: {what}; expected {expected}; fetch it again")
