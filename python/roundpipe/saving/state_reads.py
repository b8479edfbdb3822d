"""Reads an optimizer's state from the parts in which nodes have written it, in the parts in which it is needed now."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from roundpipe import _core
from roundpipe.saving.stored import StoredCheckpoint

Range = tuple[int, int]


@dataclass(frozen=True)
class Unit:
    """How a stored tensor counts the elements of its parameter.

    Attributes:
        elements: of the parameter, for each of the tensor.
        block: of the parameter, that the tensor has in whole, filled up at the end.
    """

    elements: int = 1
    block: int = 1

    def index(self, first: int) -> int:
        """The tensor's element for the parameter's one `first`, a multiple of `block`."""
        return first // self.elements

    def end(self, last: int) -> int:
        """The one after the tensor's last element, for the parameter's ones before `last`."""
        return -(-last // self.block) * self.block // self.elements


def own_range(tensor: torch.Tensor, range_: Range | None) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory; the tensor itself for None. Shares memory."""
    if range_ is None:
        return tensor
    first, last = range_
    return tensor.as_strided((last - first,), (1,), tensor.storage_offset() + first)


def _are_dense(shape: torch.Size | tuple[int, ...], strides: list[int]) -> bool:
    """Whether elements with these strides lie side by side, in any order of the dimensions."""
    if len(shape) != len(strides):
        return False
    elements = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != elements:
            return False
        elements *= size
    return True


class StateReads:
    """What is to be read of an optimizer's state. Nothing is read before `read`.

    Args:
        stored: the checkpoint.

    Attributes:
        whole_tensors: tensors that are read from their first byte to their last, by name; the caller reads them.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self.whole_tensors: dict[str, torch.Tensor] = {}
        self._ranges: dict[str, list[tuple[str, int, torch.Tensor]]] = {}  # by file
        self._afterwards: list[Callable[[], None]] = []

    def take(self, name: str, kind: str, target: torch.Tensor, like: torch.Tensor, range_: Range | None) -> None:
        """Reads a parameter's state into `target`.

        Args:
            name: the parameter's.
            kind: the state's.
            target: has the elements of `range_`, in the order of memory; or, for None, all.
            like: the parameter, or a tensor with its shape and strides.
            range_: of the parameter's elements; None for all, in a process that loads alone.

        Raises:
            ValueError: the parameter had another layout in memory, in which its 8-bit state was made.
        """
        with self._stored.as_damage():
            self._take(name, kind, target, like, range_)

    def _take(self, name: str, kind: str, target: torch.Tensor, like: torch.Tensor, range_: Range | None) -> None:
        key = f"{name}/{kind}"
        self._stored.parts_of(key)
        if range_ is None and self._stored.nodes == 1:
            self.whole_tensors[key] = target
            return
        unit = self._unit(key)
        first, last = (0, like.numel()) if range_ is None else range_
        flat = own_range(target, (0, target.numel()))
        if self._has_memory_order(name, like, unit):
            self._add(key, flat, first, last, like.numel(), unit)
            return
        if unit.block > 1:
            raise ValueError(
                f"[load_checkpoint] '{name}' had the strides {self._stored.strides(name)} when {self._stored.folder} "
                f"was saved, expected {list(like.stride())}, since its moments of 8 bits are in blocks of that order; "
                "make the model as it was"
            )
        whole = self.whole(name, kind, like.shape)

        def place() -> None:
            ordered = torch.empty_strided(like.shape, like.stride(), dtype=whole.dtype).copy_(whole)
            flat.copy_(own_range(ordered, (first, last)))

        self._afterwards.append(place)

    def whole(self, name: str, kind: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """A new tensor that takes all elements of a parameter's state, with the parameter's shape unless the state has
        another one."""
        with self._stored.as_damage():
            return self._whole(name, kind, shape)

    def _whole(self, name: str, kind: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        key = f"{name}/{kind}"
        parts = self._stored.parts_of(key)
        dtype = parts[0].tensor.torch_dtype
        if self._stored.nodes == 1:
            made = torch.empty(parts[0].tensor.shape, dtype=dtype)
            self.whole_tensors[key] = made
            return made
        unit, elements = self._unit(key), math.prod(shape)
        if unit.block > 1:
            made = torch.empty(unit.end(elements), dtype=dtype)
        else:
            strides = self._stored.strides(name)
            if strides is not None and not _are_dense(shape, strides):
                raise ValueError(f"the strides of {name} are {strides} for the shape {tuple(shape)}")
            made = (
                torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
            )
        self._add(key, own_range(made, (0, made.numel())), 0, elements, elements, unit)
        return made

    def _has_memory_order(self, name: str, like: torch.Tensor, unit: Unit) -> bool:
        """Whether files count the elements as the memory of `like` does."""
        if self._stored.nodes == 1:
            return unit.block > 1 or like.is_contiguous()
        strides = self._stored.strides(name)
        return like.is_contiguous() if strides is None else strides == list(like.stride())

    def _unit(self, key: str) -> Unit:
        codes = key.removesuffix("_scale")
        parts = self._stored.parts
        if f"{codes}_scale" not in parts or codes not in parts:
            return Unit()
        scale = next((part for part in parts[f"{codes}_scale"] if part.count), None)
        if scale is None:
            return Unit()
        of_codes = next(part for part in parts[codes] if part.first == scale.first and part.count)
        block = of_codes.count // scale.count
        return Unit(1 if key == codes else block, block)

    def _add(self, key: str, flat: torch.Tensor, first: int, last: int, elements: int, unit: Unit) -> None:
        found = 0
        for part in self._stored.parts[key]:
            part_last = elements if part.last is None else part.last
            begin, end = max(first, part.first), min(last, part_last)
            if begin >= end:
                continue
            offset = unit.index(begin) - unit.index(part.first)
            place = unit.index(begin) - unit.index(first)
            count = unit.end(end) - unit.index(begin)
            piece = flat[place : place + count]
            self._ranges.setdefault(part.tensor.file, []).append((key, offset, piece))
            found += end - begin
        if found != last - first:
            raise _core.DamagedCheckpointError(
                f"[load_checkpoint] {self._stored.folder} has {found} of the elements {first} to {last} of '{key}', "
                "expected all; it is damaged, use another checkpoint"
            )

    def read(self) -> None:
        """Reads the ranges. Files that are read in part are not verified: `StoredCheckpoint.verify_rest` does that.

        Raises:
            DamagedCheckpointError: a file is damaged.
        """
        stored = self._stored
        counts = {(part.tensor.file, key): part for key, parts in stored.parts.items() for part in parts}
        streamed = {
            file
            for file, ranges in self._ranges.items()
            if all(first == 0 and piece.numel() == counts[file, key].count for key, first, piece in ranges)
        }
        stored.read_files(
            (file, key, piece.view(counts[file, key].tensor.shape))
            for file in streamed
            for key, _, piece in self._ranges[file]
        )
        stored.read_ranges({file: ranges for file, ranges in self._ranges.items() if file not in streamed})
        for place in self._afterwards:
            place()
