"""A frozen linear layer whose weight is encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.decoded import DecodedTensor
from roundpipe.quantise.parts import apply_to_parts


class EncodedLinear(nn.Linear):
    """`nn.Linear` with an encoded weight, which is decoded while it is used: in the forward, and again in the backward.

    The weight gets no gradient; inputs and the bias do, with the bits of `nn.Linear` over the decoded weight. The
    parameters are the parts of the encoded form: `weight_codes`, `weight_scale`, and others of some formats. `weight`
    is the decoded weight, in new memory, for reading only.

    Args:
        encoding: the weight's format and dtype.
        parts: what holds the weight, see `_core.encode`.
        bias: [outputs], or None.
    """

    def __init__(
        self, encoding: _core.Encoding, parts: Sequence[torch.Tensor], bias: nn.Parameter | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.encoding = encoding
        self.out_features, self.in_features = encoding.sizes(list(parts))
        for name, part in zip(self.part_names, parts, strict=True):
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.register_parameter("bias", bias)

    @property
    def part_names(self) -> list[str]:
        """Of the parameters that hold the weight."""
        return [f"weight{suffix}" for suffix in self.encoding.suffixes]

    def parts(self) -> list[torch.Tensor]:
        """The tensors that hold the weight."""
        return [self._parameters[name] for name in self.part_names]  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return DecodedTensor.of(self.encoding.values(self.parts()))
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EncodedLinear:
        inner: Any = super()
        apply_to_parts(self, self.part_names, [self.encoding], fn, lambda: inner._apply(fn, recurse))
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.encoding.linear(input, self.parts(), self.bias)

    def extra_repr(self) -> str:
        """The sizes and the encoding."""
        return f"{super().extra_repr()}, weight={self.encoding}"
