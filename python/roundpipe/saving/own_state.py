"""What a process takes of the state that each rank has for itself, also where there were more or fewer ranks."""

from __future__ import annotations

import sys
from typing import Any

from roundpipe import _core
from roundpipe.saving.capture import BUFFERS, GRADIENTS
from roundpipe.saving.random_states import derive_random_states, derived_seed, restore_random_states
from roundpipe.saving.stored import State, StoredCheckpoint


class OwnState:
    """What a rank takes of what each rank has saved for itself.

    With as many ranks as at the save, each takes its own. With another number: a rank that the checkpoint has takes its
    own random states, and others take new ones, derived from those of rank 0 and their own number, unless all ranks had
    the same ones; values that were the same on all ranks belong to all; the others, and gradients, to nobody.

    Args:
        stored: the checkpoint.
        rank: this process's number.
        size: how many processes load it.

    Attributes:
        values: of `state=`, encoded, by name.
        differing: names of `state=` that belong to nobody.
        gradients: that no step has consumed, by name.
        buffers: that differ from those of rank 0, by name in files.
        pipelines: calls, seeds and numbers of microbatches, by the part of the model.
        loss_counts: what the losses of unconsumed gradients were; None if there are none, or of one process.
    """

    def __init__(self, stored: StoredCheckpoint, rank: int, size: int) -> None:
        self._stored, self._rank = stored, rank
        self._fits = stored.nodes == size
        self._is_there = rank < stored.nodes
        self._state: State = stored.ranks[rank if self._is_there else 0]
        self.values: dict[str, Any] = dict(self._state.values["state"])
        self.differing: list[str] = []
        self.gradients: dict[str, _core.StoredTensor] = self._state.tensors.get(GRADIENTS, {})
        self.buffers: dict[str, _core.StoredTensor] = {}
        self.pipelines: dict[str, Any] = self._state.values["pipelines"]
        self.loss_counts: dict[str, Any] | None = self._state.values.get("loss_counts") if self._fits else None
        if self._fits:
            self.buffers = self._state.tensors.get(BUFFERS, {}) if stored.nodes > 1 else {}
            return
        names = {name for state in stored.ranks for name in state.values["state"]}
        self.differing = sorted(name for name in names if not self._is_common(name))
        self.values = {name: value for name, value in self.values.items() if name not in self.differing}

    def _is_common(self, name: str) -> bool:
        states = self._stored.ranks
        if any(name not in state.values["state"] for state in states):
            return False
        return len({state.fingerprint("state", name, _kind(state.values["state"][name])) for state in states}) == 1

    def check(self, strict: bool) -> None:
        """Raises ValueError for what another number of ranks cannot have."""
        if self._fits:
            return
        there, here = _ranks(self._stored.nodes), "this number of ranks"
        holder = next((rank for rank, state in enumerate(self._stored.ranks) if state.tensors.get(GRADIENTS)), None)
        if holder is not None:
            name = next(iter(self._stored.ranks[holder].tensors[GRADIENTS]))
            raise ValueError(
                f"[load_checkpoint] {self._stored.folder} has gradients that no step has consumed ('{name}', of rank "
                f"{holder}), which belong to the batches of {there}, expected the same number of ranks; load a "
                "checkpoint that was saved right after a step"
            )
        if self.differing and strict:
            raise ValueError(
                f"[load_checkpoint] state '{self.differing[0]}' differs between the {there} that have saved "
                f"{self._stored.folder}, so {here} cannot share it, expected values that are the same on all; give "
                "strict=False to leave such values out"
            )

    def value(self, name: str) -> Any:
        """Decodes a value of `state=`."""
        return self._state.value("state", name, _kind(self.values[name]), path=f"state.{name}")

    def seed(self, path: str) -> int:
        """The seed of a part of the model."""
        saved: int = self.pipelines[path]["random_seed"]
        seeds = [state.values["pipelines"].get(path, {}).get("random_seed") for state in self._stored.ranks]
        if self._is_there or (len(seeds) > 1 and len(set(seeds)) == 1):
            return saved
        return derived_seed(saved.to_bytes(8, "little"), self._rank)

    def random_states(self) -> dict[str, Any]:
        """The states of random number generators from which this process takes or derives its own."""
        saved: dict[str, Any] = self._state.value("random", path="random")
        return saved

    def restore_random_states(self, saved: dict[str, Any]) -> None:
        """Sets the process's random number generators by `random_states`."""
        states = self._stored.ranks
        alike = len(states) > 1 and len({state.fingerprint("random") for state in states}) == 1
        if self._is_there or alike:
            restore_random_states(saved)
            return
        derive_random_states(saved, self._rank)
        print(
            f"[load_checkpoint] {self._stored.folder} was saved by {_ranks(len(states))}; rank {self._rank} has random "
            "states that are derived from those of rank 0",
            file=sys.stderr,
        )


def _kind(entry: dict[str, Any]) -> str:
    return next(iter(entry))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
