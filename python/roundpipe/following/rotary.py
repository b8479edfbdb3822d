"""Rotary positions whose frequencies depend on the longest row of a batch, such as dynamic scaling.

Transformers' modules look at the batch and keep what they found for later ones. So they run here once for each batch,
in the order of the calls, and every microbatch gets the frequencies of its batch, whatever device it runs on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

Frequencies = list[dict[str, torch.Tensor]]
"""For each rotary module, its buffers by their names."""

_FIXED = "default"  # a kind that transformers never updates
_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class LongRows:
    """The rotary modules of a model whose frequencies depend on the batch.

    Args:
        model: of transformers; its modules stay as they are.
        layers: the modules that run apart from the code around them.

    Attributes:
        modules: those around the layers.
        accepts_longer: whether rows may be longer than `max_position_embeddings`.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        inside = {id(module) for layer in layers for module in layer.modules()}
        found = [module for module in model.modules() if any(True for _ in _changing(module))]
        self.modules = [module for module in found if id(module) not in inside]
        self._twins = [_twin(module) for module in self.modules]
        try:
            for module in self.modules:
                _look(_twin(module), 1)
            runs = True
        except _ERRORS:
            runs, self.modules, self._twins = False, [], []
        self.accepts_longer = runs and bool(found) and len(self.modules) == len(found)

    def frequencies(self, longest: int) -> Frequencies:
        """The frequencies for a batch whose positions end before `longest`, after all batches so far."""
        for twin in self._twins:
            _look(twin, longest)
        return [{name: buffer.clone() for name, buffer in _frequencies(twin)} for twin in self._twins]

    def settle(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Makes a copy of one of the modules, with this `__dict__`, use the frequencies that it is given."""
        kinds: Any = module.rope_type
        state["rope_type"] = dict.fromkeys(kinds, _FIXED) if isinstance(kinds, dict) else _FIXED


def _changing(module: nn.Module) -> Iterator[str | None]:
    """The types of layers for which a rotary module's frequencies change; None for a module that has no such types."""
    kinds: Any = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            yield layer_type


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same frequencies, and its own memory of batches."""
    twin = copy.copy(module)
    twin.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return twin


def _look(twin: nn.Module, longest: int) -> None:
    """Lets a rotary module see a batch of this length."""
    buffer = next(iter(twin.buffers()))
    last = torch.tensor([[longest - 1]], device=buffer.device)
    states = torch.empty(1, 1, 1, device=buffer.device)
    for layer_type in _changing(twin):
        further = () if layer_type is None else (layer_type,)
        try:
            twin(states, last, *further)
        except _ERRORS:  # its positions have three directions
            twin(states, last.expand(3, 1, 1), *further)


def _frequencies(twin: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in twin.named_buffers(recurse=False):
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            yield name, buffer
