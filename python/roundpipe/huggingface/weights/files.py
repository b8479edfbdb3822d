"""Reads a folder of safetensors files tensor by tensor, without mapping or loading whole files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.huggingface.weights.safetensors_header import (
    CheckpointError,
    StoredTensor,
    parse_table,
    read_header,
    refuse_pointer,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"

# Bytes read at a time when values are cast, and between two checks whether to continue.
CHUNK_BYTES = 16 << 20
_OWN_MAPPING_BYTES = 1 << 17


class Checkpoint:
    """The weights of a model folder: one `model.safetensors`, or shards and their index.

    Opening it reads only headers, and checks that every file exists and is complete.

    Args:
        folder: the folder of the files.
        files: their names, if they are already known.

    Attributes:
        folder: the folder of the files.
        files: the names of the weight files, sorted.
        tensors: every tensor by its name in the files; tensors of one file in the order of their bytes.
        metadata: the `__metadata__` of each file.
        index: the index's own metadata, or None for a single file.

    Raises:
        CheckpointError: there are no safetensors, a file is missing, damaged or a pointer of Git LFS, the index is
            wrong, or two files hold the same tensor.
    """

    def __init__(self, folder: Path, files: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.index: dict[str, Any] | None = None
        self._maps: dict[str, torch.Tensor] = {}
        if files is None and (folder / SINGLE_FILE).exists():
            files = [SINGLE_FILE]
        if files is not None:
            self.files = sorted(files)
            for file in self.files:
                self._add(file)
            return
        weight_map = self._read_index()
        self.files = sorted(set(weight_map.values()))
        for file in self.files:
            self._add(file)
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(
                    f"[checkpoint] {folder / INDEX_FILE} says that {name} lies in {file}, which does not hold it; "
                    "expected an index and shards of one model; fetch the folder again"
                )

    def read(self, name: str) -> torch.Tensor:
        """Reads the tensor into new memory."""
        stored = self.tensors[name]
        tensor = empty_on_host(stored.shape, stored.torch_dtype)
        for _ in self.read_into(name, tensor):
            pass
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> Iterator[int]:
        """Reads the tensor into `out`, which is contiguous and of its shape, piece by piece.

        If `out` has another dtype, values are cast, which takes `CHUNK_BYTES` more memory. Several threads may call
        this.

        Yields:
            The bytes of each piece, once it is read.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        stored = self.tensors[name]
        same = out.dtype == stored.torch_dtype
        elements = CHUNK_BYTES // stored.torch_dtype.itemsize
        with (self.folder / stored.file).open("rb", buffering=0) as file:
            start = stored.start
            for begin in range(0, out.numel(), elements):
                piece = out.view(-1)[begin : begin + elements]
                target = piece if same else torch.empty(piece.shape, dtype=stored.torch_dtype)
                view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
                while view:
                    count = os.preadv(file.fileno(), [view], start)
                    if not count:
                        raise self._shrunk(name)
                    view, start = view[count:], start + count
                if not same:
                    piece.copy_(target)
                yield piece.numel() * stored.torch_dtype.itemsize

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of the tensor, piece by piece.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        stored = self.tensors[name]
        start = stored.start
        with (self.folder / stored.file).open("rb", buffering=0) as file:
            file.seek(start)
            while start < stored.end:
                piece = file.read(min(CHUNK_BYTES, stored.end - start))
                if not piece:
                    raise self._shrunk(name)
                start += len(piece)
                yield memoryview(piece)

    def mapped(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor in its mapped file, see `_core.map_file`; None for another dtype, or if misaligned or empty."""
        stored = self.tensors[name]
        if dtype != stored.torch_dtype or stored.start % dtype.itemsize or stored.start == stored.end:
            return None
        if stored.file not in self._maps:
            self._maps[stored.file] = _core.map_file(str(self.folder / stored.file))
        whole = self._maps[stored.file]
        if len(whole) < stored.end:
            raise self._shrunk(name)
        return whole[stored.start : stored.end].view(dtype).view(stored.shape)

    def empty(self, name: str) -> torch.Tensor:
        """A tensor of the same shape and dtype on the meta device."""
        stored = self.tensors[name]
        return torch.empty(stored.shape, dtype=stored.torch_dtype, device="meta")

    def _shrunk(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"[checkpoint] {self.folder / self.tensors[name].file} ended inside {name}, expected the file that was "
            "opened; fetch it again"
        )

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        if not path.exists():
            others = sorted(file.name for file in self.folder.glob("*.bin"))
            found = f"only {', '.join(others)}" if others else "no weights"
            raise CheckpointError(
                f"[checkpoint] {self.folder} holds {found}, expected {SINGLE_FILE} or {INDEX_FILE} with its shards; "
                "save the model with save_pretrained, which writes safetensors"
            )
        refuse_pointer(path)
        index = parse_table(path.read_bytes(), path, "the index", "a JSON table of tensors and their files")
        weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
        if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
            raise CheckpointError(
                f"[checkpoint] {path} has no weight_map, expected a table of tensors and their files; fetch it again"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not (self.folder / file).is_file():
                raise CheckpointError(
                    f"[checkpoint] {path} puts {name} into {file!r}, which is not in {self.folder}; "
                    "expected every shard beside its index; fetch the missing shard"
                )
        self.index = metadata
        return weight_map

    def _add(self, file: str) -> None:
        self.metadata[file], tensors = read_header(self.folder / file)
        for name in tensors:
            if name in self.tensors:
                raise CheckpointError(
                    f"[checkpoint] {name} lies in {self.folder / file} and in {self.tensors[name].file}, expected it "
                    "in one of them; fetch the folder again"
                )
        self.tensors |= tensors


def adapter_file(folder: Path) -> Path:
    """The file with the weights of a PEFT adapter.

    Raises:
        CheckpointError: it is not there, or a pointer of Git LFS. A pickle in its place is not read, as it can run any
            code.
    """
    path = folder / ADAPTER_FILE
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("*.bin"))
        if others:
            raise CheckpointError(
                f"[checkpoint] {folder} holds only {', '.join(others)}, a pickle, which is not read, as it can run any "
                f"code; expected {ADAPTER_FILE} beside its config; if you trust it, peft writes one: "
                f"PeftModel.from_pretrained(BASE, '{folder}').save_pretrained('{folder}')"
            )
        raise CheckpointError(
            f"[checkpoint] {folder} holds no weights, expected {ADAPTER_FILE} beside its config; save the adapter with "
            "save_pretrained of peft"
        )
    refuse_pointer(path)
    return path


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor. A large one returns its memory to the system as soon as the tensor is gone."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    if like.nbytes < _OWN_MAPPING_BYTES:
        return torch.empty(shape, dtype=dtype)
    mapping = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(like.shape)
