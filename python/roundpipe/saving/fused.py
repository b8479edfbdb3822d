"""Loads a model and the fused optimizer that updates it in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe import _core
from roundpipe.distributed.ranks import Ranks
from roundpipe.saving.capture import OPTIMIZER, PREVIOUS, REMAINDERS, WEIGHTS
from roundpipe.saving.names import ModelNames
from roundpipe.saving.state_reads import Range, StateReads, own_range
from roundpipe.saving.stored import StoredCheckpoint
from roundpipe.saving.weights import WeightPlaces
from roundpipe.step.fused_steps import FusedSteps


def load_fused(
    stored: StoredCheckpoint,
    names: ModelNames,
    places: WeightPlaces,
    group: FusedSteps,
    optimizer: Any,
    groups: Sequence[dict[str, Any]],
    ranks: Ranks,
) -> None:
    """Loads weights, the options of the optimizer's groups, and of masters, moments and counters what this rank has.
    REQUIRES: nothing runs, and all weights are settled."""
    for ours, options in zip(optimizer.param_groups, groups, strict=True):
        ours.update(options)
    binding = group.binding
    hypers = optimizer.hyperparameters_by_parameter()
    previous = stored.tensors.get(PREVIOUS, {})
    reads = StateReads(stored)
    counters = stored.counters
    destinations: dict[str, dict[str, torch.Tensor]] = {WEIGHTS: {}, PREVIOUS: {}}
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
        range_ = binding.shard(parameter) if ranks.size > 1 else None
        _place_moments(reads, name, parameter, range_, hyper, optimizer, counters.get(name))
        _, remainder = binding.state(parameter)
        saved = next((kind for kind in REMAINDERS.values() if f"{name}/{kind}" in stored.parts), None)
        if places.dtype(name) != parameter.dtype:
            target = newest.get(name, parameter.detach())
            conversion = _Converted(stored, places.sources[name][1], target, remainder, range_)
            if saved is not None:
                conversion.saved_values = reads.whole(name, saved, parameter.shape)
            converted.append(conversion)
        elif remainder is not None and saved is not None:
            reads.take(name, saved, remainder, parameter.detach(), range_)
    apart = set(newest)
    for name, target in newest.items():
        destinations[WEIGHTS][places.sources[name][1]] = target
    for conversion in converted:
        destinations[WEIGHTS][conversion.name] = conversion.weight
        apart |= {name for name, (_, in_file) in places.sources.items() if in_file == conversion.name}
    places.load_plain(except_for=apart, beside={**destinations, OPTIMIZER: reads.whole_tensors})
    reads.read()
    for conversion in converted:
        conversion.finish()
    binding.core.accept_weights()


def _place_moments(
    reads: StateReads,
    name: str,
    parameter: torch.nn.Parameter,
    range_: Range | None,
    hyper: _core.Hyperparameters,
    optimizer: Any,
    counters: dict[str, float] | None,
) -> None:
    state, _ = optimizer.binding.state(parameter)
    state.tensors = []
    state.scalars = _core.Scalars()
    own = own_range(parameter.detach(), range_)
    if counters is None or (range_ is not None and own.numel() == 0):
        return
    made = _core.make_state(optimizer.algorithm, hyper, optimizer.core_format, own)
    scalars = made.scalars
    for key, value in counters.items():
        setattr(scalars, key, value)
    for kind, tensor in zip(optimizer.names_of_state(hyper, parameter), made.tensors, strict=True):
        reads.take(name, kind, tensor, parameter.detach(), range_)
    state.tensors = made.tensors
    state.scalars = scalars


class _Converted:
    """A trained parameter whose dtype differs from the checkpoint's; its fp32 master stays the same. All of the master
    is read, since all weights follow from it.

    Attributes:
        name: in the weight files.
        weight: takes the saved weights.
        saved_values: takes the saved remainder or master; None if there is none.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        name: str,
        target: torch.Tensor,
        remainder: torch.Tensor | None,
        range_: Range | None,
    ) -> None:
        self.name, self._target, self._remainder, self._range = name, target, remainder, range_
        entry = stored.tensors[WEIGHTS][name]
        self.weight = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self.saved_values: torch.Tensor | None = None

    def finish(self) -> None:
        """Writes the weights, and what their master has beyond them."""
        saved = self.saved_values
        master = self.weight.float()
        if saved is not None and saved.dtype == torch.int16:
            master = torch.empty(self.weight.shape)
            _core.join(self.weight, saved.contiguous(), master)
        elif saved is not None:
            master = saved
        if self._remainder is None or self._remainder.dtype != torch.int16:
            self._target.copy_(master)
            if self._remainder is not None:
                self._remainder.copy_(self._own(master))
            return
        weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        _core.split(master, weight, remainder)
        self._target.copy_(weight)
        self._remainder.copy_(self._own(remainder))

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's elements, in the order of the parameter's memory."""
        if self._range is None:
            return values
        ordered = torch.empty_strided(self._target.shape, self._target.stride(), dtype=values.dtype).copy_(values)
        return own_range(ordered, self._range)
