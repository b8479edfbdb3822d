"""A checkpoint on disk: its manifest, its states, and where each tensor lies."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoint.safetensors_header import DTYPES, StoredTensor
from roundpipe.saving.capture import OPTIMIZER, WEIGHTS
from roundpipe.saving.encoding import decode, tensor_names
from roundpipe.saving.layout import STATE_FILE, STATE_TENSORS, of_rank, rank_of, section_of

_THREADS = 4


def candidates(folder: Path) -> list[Path]:
    """The checkpoint itself, or those of a run's folder, newest first."""
    if (folder / "manifest.json").exists():
        return [folder]
    return [folder / f"step-{step}" for step in reversed(_core.complete_steps(str(folder)))]


@dataclass
class State:
    """Values of a checkpoint: those of all ranks, or of one.

    Attributes:
        values: encoded, by name.
        tensors: what this rank alone has in files, by section and name.
    """

    values: dict[str, Any]
    _read_tensors: Callable[[], dict[str, torch.Tensor]]
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    _read: dict[str, torch.Tensor] | None = None

    def _values_tensors(self) -> dict[str, torch.Tensor]:
        if self._read is None:
            self._read = self._read_tensors()
        return self._read

    def decoded(self, encoded: Any, path: str) -> Any:
        """Decodes a value of this state."""
        return decode(encoded, self._values_tensors(), path)

    def digest(self, encoded: Any) -> str:
        """The same for the same values, in the states of any ranks."""
        digest = hashlib.sha256(json.dumps(encoded, sort_keys=True).encode())
        for name in tensor_names(encoded):
            tensor = self._values_tensors()[name]
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Part:
    """A stored tensor of an optimizer's state, of some elements of its parameter, counted in the order of memory.

    Attributes:
        tensor: where it lies.
        first: the first element.
        last: the one after the last; None: all elements, in the order of the parameter's dimensions.
    """

    tensor: StoredTensor
    first: int
    last: int | None

    @property
    def count(self) -> int:
        """How many elements the tensor itself has."""
        return math.prod(self.tensor.shape)


class StoredCheckpoint:
    """A complete checkpoint. Opening it reads the manifest, the states and the headers.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        nodes: how many nodes have written it.
        state: the content of `state.json`.
        tensors: its whole tensors by section ("model", "buffers", "previous", "optimizer", "gradients") and name; of
            several nodes, not the sections of which each has its own.
        parts: the optimizer's tensors by name, in the order of their elements.
        ranks: what each rank alone has; of one process, everything.

    Raises:
        RoundPipeError: it is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _core.require_complete(str(folder))
        self.nodes = self.manifest.nodes
        self._records = {record.name: record for record in self.manifest.files}
        self.state: dict[str, Any] = json.loads(self._small(STATE_FILE))
        self.tensors: dict[str, dict[str, StoredTensor]] = {}
        own: list[dict[str, dict[str, StoredTensor]]] = [{} for _ in range(self.nodes)]
        for file in self._records:
            rank, name = rank_of(file) if self.nodes > 1 else (None, file)
            section = section_of(name)
            if section is not None:
                place = self.tensors if rank is None else own[self._known(rank)]
                place.setdefault(section, {}).update(self._header(file))
        self._whole = State(self.state, lambda: self._state_tensors(STATE_TENSORS))
        if self.nodes == 1:
            self.ranks = [self._whole]
            self._whole.tensors = self.tensors
        else:
            self.ranks = [self._state_of(rank, tensors) for rank, tensors in enumerate(own)]
        self.parts: dict[str, list[Part]] = {}
        for state in self.ranks:
            for key, tensor in state.tensors.get(OPTIMIZER, {}).items():
                first, last = self._range(state, key) if self.nodes > 1 else (0, None)
                self.parts.setdefault(key, []).append(Part(tensor, first, last))
        for parts in self.parts.values():
            parts.sort(key=lambda part: part.first)

    def _known(self, rank: int) -> int:
        if rank >= self.nodes:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {self.folder} has a file of rank {rank}, expected ranks below {self.nodes}, as its "
                "manifest says; use another checkpoint"
            )
        return rank

    def _range(self, state: State, key: str) -> tuple[int, int]:
        found = state.values.get("ranges", {}).get(key.rsplit("/", 1)[0])
        if found is None:
            raise _core.RoundPipeError(
                f"[load_checkpoint] {self.folder} does not say which elements '{key}' has on one of its ranks; it is "
                "damaged, use another checkpoint"
            )
        first, last = found
        return first, last

    def _state_of(self, rank: int, tensors: dict[str, dict[str, StoredTensor]]) -> State:
        values = json.loads(self._small(of_rank(STATE_FILE, rank)))
        return State(values, lambda: self._state_tensors(of_rank(STATE_TENSORS, rank)), tensors)

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """A fused optimizer's counters, by parameter."""
        return {name: entry for state in self.ranks for name, entry in state.values.get("counters", {}).items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a trained parameter; one dimension if the weight files have it under another name."""
        weights = self.tensors.get(WEIGHTS, {})
        if name in weights:
            return weights[name].shape
        ends = [
            part.last or part.count for key, parts in self.parts.items() for part in parts if key.startswith(f"{name}/")
        ]
        return (max(ends, default=0),)

    def strides(self, name: str) -> list[int] | None:
        """The strides of a parameter that several nodes have cut, if it was not contiguous."""
        found: list[int] | None = self.ranks[0].values.get("strides", {}).get(name)
        return found

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

    def _state_tensors(self, file: str) -> dict[str, torch.Tensor]:
        if file not in self._records:
            return {}
        values = {name: torch.empty(e.shape, dtype=e.torch_dtype) for name, e in self._header(file).items()}
        _core.read_tensors(str(self.folder), self._records[file], list(values.items()))
        return values

    def value(self, encoded: Any, path: str) -> Any:
        """Decodes a value of `state`."""
        return self._whole.decoded(encoded, path)

    def read(self, destinations: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Reads whole tensors, by section and name, see `read_files`."""
        self.read_files(
            (self.tensors[section][name].file, name, tensor)
            for section, tensors in destinations.items()
            for name, tensor in tensors.items()
        )

    def read_files(self, destinations: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """Reads whole tensors, by file and name, into host tensors, and verifies each file that has one of them.

        Raises:
            RoundPipeError: a file is damaged.
            ValueError: a tensor has another shape.
        """
        by_file: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for file, name, tensor in destinations:
            by_file.setdefault(file, []).append((name, tensor))
        self._run(
            partial(_core.read_tensors, str(self.folder), self._records[file], tensors)
            for file, tensors in by_file.items()
        )

    def read_ranges(self, ranges: Mapping[str, list[tuple[str, int, torch.Tensor]]]) -> None:
        """Reads ranges of tensors' elements, by file, name and first element, and does not verify the files."""
        self._run(
            partial(_core.read_ranges, str(self.folder), self._records[file], tensors)
            for file, tensors in ranges.items()
        )

    def verify(self, files: list[str]) -> None:
        """Raises RoundPipeError if one of these files is damaged."""
        self._run(partial(_core.read_tensors, str(self.folder), self._records[file], []) for file in files)

    @staticmethod
    def _run(jobs: Iterable[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(_THREADS) as threads:
            for running in [threads.submit(job) for job in jobs]:
                running.result()
