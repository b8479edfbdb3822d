"""Modules that keep stacked matrices, such as a layer's experts, encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.decoded import DecodedTensor
from roundpipe.quantise.parts import apply_to_parts

_ENCODINGS = "encodings"


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


class EncodedStacks(nn.Module):
    """A module some of whose parameters are encoded; the base of the classes that `encode_stack` makes.

    In its forward, such a parameter is the decoded tensor, which exists until the forward ends, and again while the
    backward uses it. Elsewhere, it is the decoded tensor in new memory, for reading only.

    Attributes:
        encodings: by name, of these parameters.
        plain_class: the class whose forward runs.
    """

    encodings: dict[str, _core.Encoding]
    plain_class: type[nn.Module]

    def __getattr__(self, name: str) -> Any:
        decoded = _running.decoded.get(id(self))
        if name in self.__dict__[_ENCODINGS]:
            return DecodedTensor.of(self.values(name)) if decoded is None else decoded.get(name)
        return super().__getattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.plain_class,), self.__dict__

    def parts(self, name: str) -> list[torch.Tensor]:
        """The tensors that hold an encoded parameter."""
        return [self._parameters[name + suffix] for suffix in self.encodings[name].suffixes]  # type: ignore[misc]

    def values(self, name: str) -> torch.Tensor:
        """The numbers of an encoded parameter, in new memory."""
        return self.encodings[name].values(self.parts(name))

    def part_names(self) -> list[str]:
        """Of the parameters that hold encoded ones."""
        return [name + suffix for name, encoding in self.encodings.items() for suffix in encoding.suffixes]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EncodedStacks:
        inner: Any = super()
        apply_to_parts(self, self.part_names(), list(self.encodings.values()), fn, lambda: inner._apply(fn, recurse))
        return self

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


def encode_stack(module: nn.Module, name: str, encoding: _core.Encoding, parts: Sequence[torch.Tensor]) -> None:
    """Replaces a parameter of a module of any class by an encoded one, in place.

    Args:
        name: of the parameter.
        encoding: its format and dtype.
        parts: what holds it, see `_core.encode`.
    """
    if not isinstance(module, EncodedStacks):
        module.__class__ = _class_for(type(module))
        module.__dict__[_ENCODINGS] = {}
    module.__dict__[_ENCODINGS] = {**module.__dict__[_ENCODINGS], name: encoding}
    del module._parameters[name]
    for suffix, part in zip(encoding.suffixes, parts, strict=True):
        module._parameters[name + suffix] = nn.Parameter(part, requires_grad=False)


_classes: dict[type[nn.Module], type[EncodedStacks]] = {}


def _class_for(plain: type[nn.Module]) -> type[EncodedStacks]:
    return _classes.setdefault(plain, type(f"{plain.__name__}OfCodes", (EncodedStacks, plain), {"plain_class": plain}))


def _empty(plain: type[nn.Module]) -> EncodedStacks:
    """For pickles, which do not find the class by its name."""
    kind = _class_for(plain)
    return kind.__new__(kind)
