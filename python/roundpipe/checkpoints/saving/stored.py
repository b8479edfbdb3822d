"""A checkpoint on disk as Python's objects: its states, and where each tensor lies. The engine reads and checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core

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


@contextmanager
def as_damage(folder: Path) -> Iterator[None]:
    """Turns what values of the states make Python raise into the error of a damaged checkpoint. What the caller has
    given wrong is a ValueError whose message begins with a place in brackets."""
    try:
        yield
    except _OF_VALUES as error:
        if isinstance(error, (_core.RoundPipeError, torch.OutOfMemoryError)) or str(error).startswith("["):
            raise
        first = (str(error).splitlines() or [""])[0]
        raise _core.DamagedCheckpointError(
            f"[load_checkpoint] {folder / STATE_FILE} has a value that cannot be used "
            f"({type(error).__name__}: {first}); it is damaged, use another checkpoint"
        ) from error


class StoredCheckpoint:
    """A complete checkpoint. Opening it reads the manifest, the states and the headers, and checks what they say.

    Args:
        folder: its folder.

    Attributes:
        core: the engine's.
        folder: its folder.
        manifest: its manifest.
        nodes: how many nodes have written it.
        state: the content of `state.json`.
        tensors: its whole tensors by section ("model", "buffers", "previous", "optimizer", "gradients") and name; of
            several nodes, not the sections of which each has its own.
        ranks: what each rank alone has; of one process, everything.

    Raises:
        DamagedCheckpointError: it is incomplete or damaged. So do all methods that read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = core = _core.StoredCheckpoint(str(folder))
        self.manifest = core.manifest
        self.nodes = self.manifest.nodes
        self.tensors = core.sections()
        with as_damage(folder):
            self._whole = State(core)
            self.state = self._whole.values
            self.ranks = [self._whole] if self.nodes == 1 else [State(core, rank) for rank in range(self.nodes)]

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """A fused optimizer's counters, by parameter."""
        return {name: entry for state in self.ranks for name, entry in state.values.get("counters", {}).items()}

    def value(self, *keys: str | int, path: str) -> Any:
        """Decodes a value of `state`, see `State.value`."""
        return self._whole.value(*keys, path=path)
