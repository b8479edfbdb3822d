"""Where a checkpoint's weights and buffers go in a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd.graph import increment_version

from roundpipe.saving.capture import BUFFERS, WEIGHTS
from roundpipe.saving.names import ModelNames
from roundpipe.saving.stored import StoredCheckpoint


class WeightPlaces:
    """The parameters and buffers that both a checkpoint and a model have.

    Attributes:
        sources: section and name in the files of each of them, by its name in the model.
        missing: names that only the model has.
        unexpected: names that only the checkpoint has, as its files have them.
    """

    def __init__(self, stored: StoredCheckpoint, names: ModelNames) -> None:
        self._stored, self._names = stored, names
        self.targets: dict[str, torch.Tensor] = {**names.buffers, **names.parameters}
        self.sources: dict[str, tuple[str, str]] = {}
        tied: dict[str, str] = stored.state["tied"]
        used: set[tuple[str, str]] = set()
        for name in self.targets:
            for candidate in (name, tied.get(name)):
                if candidate is None:
                    continue
                found = self._find(candidate)
                if found is not None:
                    self.sources[name] = found
                    used.add(found)
                    break
        here = {(section, name) for section in (WEIGHTS, BUFFERS) for name in stored.tensors.get(section, {})}
        self.missing = tuple(n for n in self.targets if n not in self.sources and n not in names.outside)
        self.unexpected = tuple(sorted(name for _, name in here - used))

    def _find(self, name: str) -> tuple[str, str] | None:
        for section in (WEIGHTS, BUFFERS):
            if self._names.file_name(name) in self._stored.tensors.get(section, {}):
                return section, self._names.file_name(name)
        return None

    def check_shapes(self) -> None:
        """Raises ValueError if a tensor has another shape than in the model."""
        for name, (section, in_file) in self.sources.items():
            shape = self._stored.tensors[section][in_file].shape
            if shape != tuple(self.targets[name].shape):
                self._stored.require_whole(section)
                raise ValueError(
                    f"[load_checkpoint] '{name}' has shape {shape} in {self._stored.folder}, expected "
                    f"{tuple(self.targets[name].shape)}; load it into the model that was saved"
                )

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a parameter or buffer in the files."""
        section, in_file = self.sources[name]
        return self._stored.tensors[section][in_file].torch_dtype

    def load_plain(
        self,
        except_for: frozenset[str] | set[str] = frozenset(),
        beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Reads the values into the model's own tensors, cast where dtypes differ.

        Args:
            except_for: names in the model that are left out.
            beside: other tensors to read, by section and name in the files, so that each file is read once.
        """
        destinations = {section: dict(tensors) for section, tensors in (beside or {}).items()}
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, (section, in_file) in self.sources.items():
            if name in except_for:
                continue
            target = self.targets[name].detach()
            taken = destinations.setdefault(section, {}).setdefault(in_file, target)
            if taken is not target:
                again.append((target, taken))
        self._stored.read(destinations)
        for target, taken in again:
            target.copy_(taken)
        increment_version([tensor for name, tensor in self.targets.items() if name in self.sources])
