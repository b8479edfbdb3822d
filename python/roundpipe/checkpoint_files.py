"""Reads a folder of safetensors files tensor by tensor, without mapping or loading whole files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LFS_START = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. `start` and `end` are byte offsets in its file, `dtype` is safetensors' name."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


class Checkpoint:
    """The weights of a model folder: one `model.safetensors`, or shards and their index.

    Opening it reads headers only, and checks that every file is there and whole.

    Attributes:
        folder: where the files lie.
        files: the names of the weight files, in the order of their names.
        tensors: every tensor by its name in the files; those of one file in the order of their bytes.
        metadata: the `__metadata__` of each file.
        index: the index's own metadata, or None for a single file.

    Raises:
        ValueError: no safetensors, a file that is missing, cut off, or a pointer of Git LFS, a wrong index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.index: dict[str, Any] | None = None
        if (folder / SINGLE_FILE).exists():
            self.files = [SINGLE_FILE]
            self._read_header(SINGLE_FILE)
            return
        weight_map = self._read_index()
        self.files = sorted(set(weight_map.values()))
        for file in self.files:
            self._read_header(file)
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ValueError(
                    f"[checkpoint] {folder / INDEX_FILE} says that {name} lies in {file}, which does not hold it; "
                    "expected an index and shards of one model; fetch the folder again"
                )

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        stored = self.tensors[name]
        data = bytearray(stored.end - stored.start)
        with (self.folder / stored.file).open("rb", buffering=0) as file:
            file.seek(stored.start)
            view = memoryview(data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"[checkpoint] {self.folder / stored.file} ended inside {name}; fetch it again")
                view = view[count:]
        if not data:
            return torch.empty(stored.shape, dtype=stored.torch_dtype)
        return torch.frombuffer(data, dtype=stored.torch_dtype).reshape(stored.shape)

    def empty(self, name: str) -> torch.Tensor:
        """A tensor of the same shape and dtype on the meta device."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ValueError(
                f"[checkpoint] {name} in {self.folder / stored.file} has the dtype {stored.dtype}, expected one of "
                f"{', '.join(_DTYPES)}; give a base whose weights are not quantised"
            )
        return torch.empty(stored.shape, dtype=stored.torch_dtype, device="meta")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        if not path.exists():
            others = sorted(file.name for file in self.folder.glob("*.bin"))
            found = f"only {', '.join(others)}" if others else "no weights"
            raise ValueError(
                f"[checkpoint] {self.folder} holds {found}, expected {SINGLE_FILE} or {INDEX_FILE} with its shards; "
                "save the model with save_pretrained, which writes safetensors"
            )
        refuse_pointer(path)
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            weight_map = dict(index["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"[checkpoint] {path} cannot be read ({error}), expected JSON with a weight_map; fetch it again"
            ) from None
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not (self.folder / file).exists():
                raise ValueError(
                    f"[checkpoint] {path} puts {name} into {file!r}, which is not in {self.folder}; "
                    "expected every shard beside its index; fetch the missing shard"
                )
        self.index = dict(index.get("metadata") or {})
        return weight_map

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        refuse_pointer(path)
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= size - 8:
                raise _damaged(path, f"its header would end at byte {8 + length} of {size}")
            try:
                header = json.loads(stream.read(length))
                metadata = header.pop("__metadata__", None) or {}
                begin = 8 + length
                found = {
                    name: StoredTensor(
                        file,
                        str(entry["dtype"]),
                        tuple(int(n) for n in entry["shape"]),
                        begin + int(entry["data_offsets"][0]),
                        begin + int(entry["data_offsets"][1]),
                    )
                    for name, entry in header.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise _damaged(path, f"its header is no JSON table of tensors ({error})") from None
        end = max((tensor.end for tensor in found.values()), default=begin)
        if end != size:
            raise _damaged(path, f"it has {size} bytes where its header describes {end}")
        self.metadata[file] = dict(metadata)
        self.tensors |= dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))


def refuse_pointer(path: Path) -> None:
    """Raises ValueError when `path` is what Git leaves in place of a large file that was not fetched."""
    with path.open("rb") as file:
        if file.read(len(_LFS_START)) == _LFS_START:
            raise ValueError(
                f"[checkpoint] {path} is a pointer of Git LFS, expected the file itself; run `git lfs pull` "
                "in its folder"
            )


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"[checkpoint] {path} is damaged: {what}; expected a whole safetensors file; fetch it again")
