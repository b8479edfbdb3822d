"""A frozen linear layer whose weight is encoded."""

from __future__ import annotations

import torch
from torch import nn

from roundpipe.quantise.encoded_module import EncodedModule


class EncodedLinear(EncodedModule, nn.Linear):
    """`nn.Linear` with an encoded weight, which is decoded while it is used: in the forward, and again in the backward.

    The weight gets no gradient; inputs and the bias do, with the bits of `nn.Linear` over the decoded weight.
    """

    plain_class = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.encodings["weight"].linear(input, self.parts("weight"), self.bias)

    def extra_repr(self) -> str:
        """The sizes and the encoding."""
        return f"{super().extra_repr()}, weight={self.encodings['weight']}"
