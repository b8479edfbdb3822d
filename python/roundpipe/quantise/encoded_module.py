"""A module some of whose parameters are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.decoded import DecodedTensor


class EncodedModule(nn.Module):
    """The base of such modules. Instead of an encoded parameter, there are the parts of its encoded form: of `weight`,
    `weight_codes`, `weight_scale`, and others of some formats. They are frozen. The parameter's own name gives the
    decoded tensor, in new memory, for reading only.

    Attributes:
        encodings: by name of an encoded parameter, its format and dtype.
        plain_class: the module's class before.
    """

    encodings: dict[str, _core.Encoding]
    plain_class: type[nn.Module]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("encodings", ()):
            return DecodedTensor.of(self.values(name))
        return super().__getattr__(name)

    def parts(self, name: str) -> list[torch.Tensor]:
        """The tensors that hold an encoded parameter."""
        return [self._parameters[name + suffix] for suffix in self.encodings[name].suffixes]  # type: ignore[misc]

    def values(self, name: str) -> torch.Tensor:
        """The numbers of an encoded parameter, in new memory."""
        return self.encodings[name].values(self.parts(name))

    def part_names(self) -> list[str]:
        """Of the parameters that hold encoded ones."""
        return [name + suffix for name, encoding in self.encodings.items() for suffix in encoding.suffixes]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EncodedModule:
        """What is behind `to`, `half` and `cuda`. Parts move to another device and keep their dtypes: scales are no
        weights. Raises ValueError for another dtype of the weights."""
        for encoding in self.encodings.values():
            cast = fn(torch.empty(0, dtype=encoding.dtype)).dtype
            if cast != encoding.dtype:
                raise ValueError(
                    f"[quantise] weights that decode to {encoding.dtype} were to become {cast}, expected the dtype "
                    "that they were encoded with; cast the model first, then encode it"
                )
        parts = {name: self._parameters.pop(name) for name in self.part_names()}
        inner: Any = super()
        try:
            inner._apply(fn, recurse)
            for name, part in parts.items():
                assert part is not None
                moved = fn(part.data)
                if moved.dtype != part.dtype:
                    moved = part.data.to(moved.device)
                if torch._has_compatible_shallow_copy_type(part, moved):
                    part.data = moved
                else:
                    parts[name] = nn.Parameter(moved, requires_grad=False)
        finally:
            self._parameters.update(parts)
        return self
