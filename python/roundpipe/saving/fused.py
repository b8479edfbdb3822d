"""Loads a model and the fused optimizer that updates it in place."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.saving.capture import OPTIMIZER, PREVIOUS, REMAINDERS, WEIGHTS
from roundpipe.saving.names import ModelNames
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.saving.torch_state import load_groups
from roundpipe.saving.weights import WeightPlaces
from roundpipe.step.fused_steps import FusedSteps


def load_fused(
    stored: StoredCheckpoint, names: ModelNames, places: WeightPlaces, group: FusedSteps, optimizer: Any
) -> None:
    """Loads weights, masters, moments and counters. REQUIRES: nothing runs, and all weights are settled."""
    load_groups(stored, names, optimizer)
    binding = group.binding
    hypers = optimizer.hyperparameters_by_parameter()
    previous = stored.tensors.get(PREVIOUS, {})
    kept = stored.tensors.get(OPTIMIZER, {})
    destinations: dict[str, dict[str, torch.Tensor]] = {WEIGHTS: {}, PREVIOUS: {}, OPTIMIZER: {}}
    converted: list[_Converted] = []
    next_weights: dict[int, list[torch.Tensor]] = {}
    # Where the weights after the last step go, of blocks whose calls read those before.
    newest: dict[str, torch.Tensor] = {}
    for name, parameter in names.parameters.items():
        block, index = binding.place(parameter)
        if name in previous and name in places.sources:
            if block not in next_weights:
                next_weights[block] = binding.core.load_next_weights(block)
            newest[name] = next_weights[block][index]
            destinations[PREVIOUS][name] = parameter.detach()
        hyper = hypers.get(parameter)
        if hyper is None or name not in places.sources:
            continue
        _place_moments(stored, name, parameter, hyper, optimizer, destinations[OPTIMIZER])
        _, remainder = binding.state(parameter)
        saved_remainder = next((f"{name}/{kind}" for kind in REMAINDERS.values() if f"{name}/{kind}" in kept), None)
        if places.dtype(name) != parameter.dtype:
            conversion = _Converted(
                stored, places.sources[name][1], saved_remainder, newest.get(name, parameter.detach())
            )
            conversion.remainder = remainder
            converted.append(conversion)
        elif remainder is not None and saved_remainder is not None:
            destinations[OPTIMIZER][saved_remainder] = remainder
    apart = set(newest)
    for name, target in newest.items():
        destinations[WEIGHTS][places.sources[name][1]] = target
    for conversion in converted:
        destinations[WEIGHTS][conversion.name] = conversion.weight
        if conversion.saved_remainder is not None:
            destinations[OPTIMIZER][conversion.saved_remainder] = conversion.saved_values
        apart |= {name for name, (_, in_file) in places.sources.items() if in_file == conversion.name}
    places.load_plain(except_for=apart, beside=destinations)
    for conversion in converted:
        conversion.finish()
    binding.core.accept_weights()


def _place_moments(
    stored: StoredCheckpoint,
    name: str,
    parameter: torch.nn.Parameter,
    hyper: _core.Hyperparameters,
    optimizer: Any,
    destinations: dict[str, torch.Tensor],
) -> None:
    state, _ = optimizer.binding.state(parameter)
    counters = stored.state["counters"].get(name)
    state.tensors = []
    state.scalars = _core.Scalars()
    if counters is None:
        return
    made = _core.make_state(optimizer.algorithm, hyper, optimizer.core_format, parameter)
    scalars = made.scalars
    for key, value in counters.items():
        setattr(scalars, key, value)
    for key, tensor in zip(optimizer.names_of_state(hyper, parameter), made.tensors, strict=True):
        destinations[f"{name}/{key}"] = tensor
    state.tensors = made.tensors
    state.scalars = scalars


class _Converted:
    """A trained parameter whose dtype differs from the checkpoint's; its fp32 master stays the same.

    Attributes:
        weight: takes the saved weights.
        saved_values: takes the saved remainder or master.
        remainder: of the model; None for fp32.
    """

    def __init__(self, stored: StoredCheckpoint, name: str, saved_remainder: str | None, target: torch.Tensor) -> None:
        self.name, self.saved_remainder, self._target = name, saved_remainder, target
        entry = stored.tensors[WEIGHTS][name]
        self.weight = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self.remainder: torch.Tensor | None = None
        self.saved_values = torch.empty(0)
        if saved_remainder is not None:
            kept = stored.tensors[OPTIMIZER][saved_remainder]
            self.saved_values = torch.empty(kept.shape, dtype=kept.torch_dtype)

    def finish(self) -> None:
        """Writes the weights, and what their master has beyond them."""
        master = self.weight.float()
        if self.saved_remainder is not None and self.saved_values.dtype == torch.int16:
            master = torch.empty(self.weight.shape)
            _core.join(self.weight, self.saved_values, master)
        elif self.saved_remainder is not None:
            master = self.saved_values
        if self.remainder is not None and self.remainder.dtype == torch.int16:
            weight, remainder = (
                torch.empty_like(master, dtype=torch.bfloat16),
                torch.empty_like(master, dtype=torch.int16),
            )
            _core.split(master, weight, remainder)
            self._target.copy_(weight)
            self.remainder.copy_(remainder)
            return
        self._target.copy_(master)
        if self.remainder is not None:
            self.remainder.copy_(master)
