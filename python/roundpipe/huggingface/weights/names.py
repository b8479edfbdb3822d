"""Maps the tensors in a model's files to the parameters of the model, and back.

transformers renames some tensors when it loads a folder, and builds other parameters out of several tensors (the
experts of a layer, for example). This module applies transformers' own rules, so a folder is read as transformers reads
it and written in its original form.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from roundpipe.huggingface.weights.files import Checkpoint
from roundpipe.huggingface.weights.safetensors_header import CheckpointError

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Source:
    """Tensors of the files that belong together, and the parameters that they become.

    Attributes:
        keys: names in the files, each with the converter's pattern that it matched.
        converter: transformers' conversion; None for one tensor that is one parameter.
        parameters: names in the model.
    """

    keys: tuple[tuple[str, str], ...]
    converter: Any
    parameters: tuple[str, ...]


class Names:
    """The parameters and persistent buffers of a model, and their places in the files.

    Args:
        model: on the meta device.
        checkpoint: its files.
        conversions: transformers' rules for this model, in their order.

    Attributes:
        sources: by the name of each parameter that the files hold.
        unplaced: tensors of the files that become nothing, by the names that transformers gives them.

    Raises:
        CheckpointError: tensors to be stacked have different shapes.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, conversions: Iterable[Any]) -> None:
        self._model = model
        conversions = list(conversions)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._known = model.state_dict()
        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        gathered: dict[str, list[tuple[str, str]]] = {}
        self.sources: dict[str, Source] = {}
        self.unplaced: dict[str, str] = {}
        for key in sorted(checkpoint.tensors, key=dot_natural_key):
            name, pattern = self.parameter_of(key)
            if name not in self._known:
                self.unplaced[name] = key
            elif pattern is not None:
                gathered.setdefault(name, []).append((key, pattern))
            else:
                self.sources[name] = Source(((key, key),), None, (name,))
        for name, keys in gathered.items():
            _refuse_unlike(checkpoint, keys, name)
            converter = by_pattern[keys[0][1]]
            made = self._convert(Source(tuple(keys), converter, (name,)), checkpoint.empty)
            source = Source(tuple(keys), converter, tuple(made))
            self.sources |= dict.fromkeys(source.parameters, source)

    def parameter_of(self, key: str) -> tuple[str, str | None]:
        """The name that a tensor of the files gets, and the pattern of the converter that handles it, if any."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and key in self._known:
            name, pattern = rename_source_key(key, [], [], prefix, self._known)
        return name, pattern

    def load(self, source: Source, read: Read) -> dict[str, torch.Tensor]:
        """Loads the parameters of a source. `read` returns a tensor of the files."""
        if source.converter is None:
            return {source.parameters[0]: read(source.keys[0][0])}
        return self._convert(source, read)

    def store(self, source: Source, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reverses `load`: returns the tensors of the files.

        Raises:
            ValueError: transformers' reverse conversion does not return the tensors that the files hold.
        """
        keys = [key for key, _ in source.keys]
        if source.converter is None:
            return {keys[0]: parameters[source.parameters[0]]}
        stored: dict[str, torch.Tensor] = revert_weight_conversion(self._model, parameters)
        if stored.keys() != set(keys):
            raise ValueError(
                f"[export] {', '.join(source.parameters)} is built from {_few(keys)} of the files, and transformers "
                f"would write it back as {_few(sorted(stored))}; expected the same names; save the base again with "
                "save_pretrained and merge into that"
            )
        return stored

    def _convert(self, source: Source, read: Read) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(source.converter)
        first = source.parameters[0]
        for key, pattern in source.keys:
            converter.add_tensor(first, key, pattern, read(key))
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _refuse_unlike(checkpoint: Checkpoint, keys: list[tuple[str, str]], name: str) -> None:
    """Raises CheckpointError for a tensor whose shape differs from those that it is stacked with."""
    for pattern in {pattern for _, pattern in keys}:
        shapes = {key: checkpoint.tensors[key].shape for key, found in keys if found == pattern}
        [(usual, _)] = Counter(shapes.values()).most_common(1)
        for key, shape in shapes.items():
            if shape != usual:
                raise CheckpointError(
                    f"[checkpoint] {key} in {checkpoint.folder / checkpoint.tensors[key].file} has the shape {shape}, "
                    f"expected {usual} like the others that become {name}; fetch the model again"
                )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
