"""A checkpoint on disk: its manifest, its state, and where each tensor lies."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoint.safetensors_header import DTYPES, StoredTensor
from roundpipe.saving.encoding import decode
from roundpipe.saving.save import STATE_FILE, STATE_TENSORS

_THREADS = 4


def candidates(folder: Path) -> list[Path]:
    """The checkpoint itself, or those of a run's folder, newest first."""
    if (folder / "manifest.json").exists():
        return [folder]
    return [folder / f"step-{step}" for step in reversed(_core.complete_steps(str(folder)))]


class StoredCheckpoint:
    """A complete checkpoint. Opening it reads the manifest, the state and the headers.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        state: the content of `state.json`.
        tensors: its tensors by section ("model", "buffers", "previous", "optimizer", "gradients") and name.

    Raises:
        RoundPipeError: it is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _core.require_complete(str(folder))
        self._records = {record.name: record for record in self.manifest.files}
        self.state: dict[str, Any] = json.loads(self._small(STATE_FILE))
        self.tensors: dict[str, dict[str, StoredTensor]] = {}
        for name in self._records:
            if name.endswith(".safetensors") and name != STATE_TENSORS:
                found = self._header(name)
                stem = name.removesuffix(".safetensors")
                section = "model" if stem == "adapter_model" else stem.split("-")[0]
                self.tensors.setdefault(section, {}).update(found)
        self._values: dict[str, torch.Tensor] | None = None

    def _header(self, file: str) -> dict[str, StoredTensor]:
        path = self.folder / file
        found = {}
        for entry in _core.read_safetensors_header(str(path)).tensors:
            if entry.dtype not in DTYPES:
                raise _core.RoundPipeError(
                    f"[load_checkpoint] '{entry.name}' in {path} has the dtype {entry.dtype}, expected one of torch's"
                )
            end = entry.offset + entry.bytes
            found[entry.name] = StoredTensor(file, entry.dtype, tuple(entry.shape), entry.offset, end)
        return found

    def _small(self, name: str) -> bytes:
        record = self._records.get(name)
        if record is None:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {self.folder} has no {name}, expected a checkpoint of save_checkpoint"
            )
        content = (self.folder / name).read_bytes()
        if _core.crc32c(content) != record.crc32c:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {self.folder / name} has another checksum than its manifest says; it is damaged, "
                "use another checkpoint"
            )
        return content

    def value(self, encoded: Any, path: str) -> Any:
        """Decodes a value of the state."""
        if self._values is None:
            self._values = {}
            if STATE_TENSORS in self._records:
                found = self._header(STATE_TENSORS)
                self._values = {name: torch.empty(e.shape, dtype=e.torch_dtype) for name, e in found.items()}
                record = self._records[STATE_TENSORS]
                _core.read_tensors(str(self.folder), record, list(self._values.items()))
        return decode(encoded, self._values, path)

    def read(self, destinations: dict[str, dict[str, torch.Tensor]]) -> None:
        """Reads tensors, by section and name, into host tensors, and verifies each file that has one of them.

        Raises:
            RoundPipeError: a file is damaged.
            ValueError: a tensor has another shape.
        """
        by_file: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for section, tensors in destinations.items():
            for name, tensor in tensors.items():
                by_file.setdefault(self.tensors[section][name].file, []).append((name, tensor))
        with ThreadPoolExecutor(_THREADS) as threads:
            jobs = [
                threads.submit(_core.read_tensors, str(self.folder), self._records[file], tensors)
                for file, tensors in by_file.items()
            ]
            for job in jobs:
                job.result()
