"""A checkpoint on disk as Python's objects: its states, and where each tensor lies. The engine reads and checks it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.saving.capture import OPTIMIZER, WEIGHTS

STATE_FILE = "state.json"
# What Python raises for values of other types and ranges than it takes.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class State:
    """Values of a checkpoint: those of all ranks, or of one.

    Args:
        core: the checkpoint.
        rank: whose they are; -1 for all.

    Attributes:
        values: encoded, by name.
        tensors: what this rank alone has in files, by section and name.
    """

    def __init__(self, core: _core.StoredCheckpoint, rank: int = -1) -> None:
        self._core, self._rank = core, rank
        self.values: dict[str, Any] = json.loads(core.state_text(rank))
        self.tensors = core.sections(rank)

    def value(self, *keys: str | int, path: str) -> Any:
        """Decodes what lies under these names of `values` and numbers in lists. `path` names it in messages."""
        return self._core.value(list(keys), path, self._rank)

    def fingerprint(self, *keys: str | int) -> int:
        """The same for the same values, in the states of any ranks."""
        return self._core.fingerprint(list(keys), self._rank)


@dataclass(frozen=True)
class Part:
    """A stored tensor of an optimizer's state, of some elements of its parameter, counted in the order of memory.

    Attributes:
        tensor: where it lies.
        first: the first element.
        last: the one after the last; None: all elements, in the order of the parameter's dimensions.
    """

    tensor: _core.StoredTensor
    first: int
    last: int | None

    @property
    def count(self) -> int:
        """How many elements the tensor itself has."""
        return math.prod(self.tensor.shape)


class StoredCheckpoint:
    """A complete checkpoint. Opening it reads the manifest, the states and the headers, and checks what they say.

    Args:
        folder: its folder.
        weights_only: look only at weights, buffers and what belongs to them.

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
        DamagedCheckpointError: it is incomplete or damaged. So do all methods that read.
    """

    def __init__(self, folder: Path, weights_only: bool = False) -> None:
        self.folder = folder
        self._core = core = _core.StoredCheckpoint(str(folder), weights_only)
        self.manifest = core.manifest
        self.nodes = self.manifest.nodes
        self.tensors = core.sections()
        self.ranks: list[State] = []
        self.parts: dict[str, list[Part]] = {}
        with self.as_damage():
            self._whole = State(core)
            self.state = self._whole.values
            if weights_only:
                return
            self.ranks = [self._whole] if self.nodes == 1 else [State(core, rank) for rank in range(self.nodes)]
        for state in self.ranks:
            for key, tensor in state.tensors.get(OPTIMIZER, {}).items():
                first, last = (0, None) if self.nodes == 1 else state.values["ranges"][key.rsplit("/", 1)[0]]
                self.parts.setdefault(key, []).append(Part(tensor, first, last))
        for parts in self.parts.values():
            parts.sort(key=lambda part: part.first)

    @contextmanager
    def as_damage(self) -> Iterator[None]:
        """Turns what values of the states make Python raise into the error of a damaged checkpoint. What the caller
        has given wrong is a ValueError whose message begins with a place in brackets."""
        try:
            yield
        except _OF_VALUES as error:
            if isinstance(error, (_core.RoundPipeError, torch.OutOfMemoryError)) or str(error).startswith("["):
                raise
            first = (str(error).splitlines() or [""])[0]
            raise _core.DamagedCheckpointError(
                f"[load_checkpoint] {self.folder / STATE_FILE} has a value that cannot be used "
                f"({type(error).__name__}: {first}); it is damaged, use another checkpoint"
            ) from error

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

    def parts_of(self, key: str) -> list[Part]:
        """The parts of an optimizer's tensor."""
        if key not in self.parts:
            self.require_whole(OPTIMIZER)
            raise _core.DamagedCheckpointError(
                f"[load_checkpoint] {self.folder} has no '{key}' in its optimizer files, expected it, as its state "
                "says; use another checkpoint"
            )
        return self.parts[key]

    def value(self, *keys: str | int, path: str) -> Any:
        """Decodes a value of `state`, see `State.value`."""
        return self._whole.value(*keys, path=path)

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
            ValueError: a tensor has another shape.
        """
        self._core.read_files(list(destinations))

    def read_ranges(self, ranges: Mapping[str, list[tuple[str, int, torch.Tensor]]]) -> None:
        """Reads ranges of tensors' elements, by file, name and first element, and does not verify the files."""
        self._core.read_ranges(ranges)

    def require_whole(self, *sections: str) -> None:
        """Verifies the files of these sections. To be called before what their headers say is taken for a mistake of
        the caller, who has given another model."""
        self._core.require_whole(list(sections))

    def verify_rest(self, rank: int, size: int) -> None:
        """Verifies what was not read as a whole, so that no file's damage goes unnoticed: of `size` processes that do
        this together, the share of `rank`."""
        self._core.verify_rest(rank, size)
