"""Reads a folder of safetensors files tensor by tensor, without mapping or loading whole files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roundpipe.safetensors_header import StoredTensor, parse_table, read_header, refuse_pointer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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
        ValueError: no safetensors, a file that is missing, damaged, or a pointer of Git LFS, a wrong index, a tensor
            that two files hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.index: dict[str, Any] | None = None
        if (folder / SINGLE_FILE).exists():
            self.files = [SINGLE_FILE]
            self._add(SINGLE_FILE)
            return
        weight_map = self._read_index()
        self.files = sorted(set(weight_map.values()))
        for file in self.files:
            self._add(file)
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
        index = parse_table(path.read_bytes(), path, "the index", "a JSON table of tensors and their files")
        weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            raise ValueError(
                f"[checkpoint] {path} has no weight_map, expected a table of tensors and their files; fetch it again"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not (self.folder / file).is_file():
                raise ValueError(
                    f"[checkpoint] {path} puts {name} into {file!r}, which is not in {self.folder}; "
                    "expected every shard beside its index; fetch the missing shard"
                )
        self.index = metadata
        return weight_map

    def _add(self, file: str) -> None:
        self.metadata[file], tensors = read_header(self.folder / file)
        for name in tensors:
            if name in self.tensors:
                raise ValueError(
                    f"[checkpoint] {name} lies in {self.folder / file} and in {self.tensors[name].file}, expected it "
                    "in one of them; fetch the folder again"
                )
        self.tensors |= tensors
