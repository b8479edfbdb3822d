"""Modules that keep stacked matrices, such as a layer's experts, encoded."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.encoded_module import EncodedModule


class _View(NamedTuple):
    """A view of decoded numbers, as a graph keeps it."""

    parts: list[torch.Tensor]
    encoding: _core.Encoding
    matrix: int | None  # of the stack; None: the view shows several
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def values(self) -> torch.Tensor:
        if self.matrix is None:
            whole = self.encoding.values(self.parts)
        else:
            whole = self.encoding.matrix(self.parts, self.matrix)
        return whole.as_strided(self.size, self.stride, self.offset)


class _Decoded:
    """What one forward of a module has decoded."""

    def __init__(self, module: EncodedStacks) -> None:
        self.module = module
        self.values: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self.values:
            self.values[name] = self.module.values(name)
        return self.values[name]

    def pack(self, tensor: torch.Tensor) -> _View | tuple[torch.Tensor, int]:
        """For a graph: the place of decoded numbers instead of these."""
        storage = tensor.untyped_storage()._cdata
        name = next((n for n, values in self.values.items() if values.untyped_storage()._cdata == storage), None)
        if name is None:
            return tensor, tensor._version
        offset, each = int(tensor.storage_offset()), self.values[name][0].numel()
        last = offset + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        matrix = offset // each if tensor.numel() > 0 and offset // each == last // each else None
        start = 0 if matrix is None else matrix * each
        parts = [part.detach() for part in self.module.parts(name)]
        return _View(parts, self.module.encodings[name], matrix, tensor.shape, tensor.stride(), offset - start)


def _unpack(kept: _View | tuple[torch.Tensor, int]) -> torch.Tensor:
    if isinstance(kept, _View):
        return kept.values()
    tensor, version = kept
    if tensor._version != version:  # which torch does not check where there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{list(tensor.shape)} is at version {tensor._version}, expected {version}"
        )
    return tensor


class _Running(threading.local):
    """By id of a module: the forward of it that runs in this thread."""

    def __init__(self) -> None:
        self.decoded: dict[int, _Decoded] = {}


_running = _Running()


class EncodedStacks(EncodedModule):
    """Other modules than linear layers; the base of the classes that `class_for` makes.

    In its forward, an encoded parameter is the decoded tensor, which exists until the forward ends, and again while the
    backward uses it.
    """

    def __getattr__(self, name: str) -> Any:
        decoded = _running.decoded.get(id(self))
        return super().__getattr__(name) if decoded is None or name not in self.encodings else decoded.get(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.plain_class,), self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the plain class computes, with the same bits."""
        before = _running.decoded.get(id(self))
        decoded = _running.decoded[id(self)] = _Decoded(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(decoded.pack, _unpack):
                return super().forward(*args, **kwargs)
        finally:
            decoded.values.clear()
            if before is None:
                del _running.decoded[id(self)]
            else:
                _running.decoded[id(self)] = before


_classes: dict[type[nn.Module], type[EncodedStacks]] = {}


def class_for(plain: type[nn.Module]) -> type[EncodedStacks]:
    """The class of modules of a plain class that have encoded parameters."""
    if plain not in _classes:
        _classes[plain] = type(f"{plain.__name__}OfCodes", (EncodedStacks, plain), {"plain_class": plain})
    return _classes[plain]


def _empty(plain: type[nn.Module]) -> EncodedStacks:
    """For pickles, which do not find the class by its name."""
    kind = class_for(plain)
    return kind.__new__(kind)
