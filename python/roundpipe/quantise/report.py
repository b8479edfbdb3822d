"""What a model's encoded weights take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from roundpipe import _core
from roundpipe.quantise.modules import split_parameters


@dataclass(frozen=True)
class EncodedBytes:
    """Bytes of a model's parameters on the host, and on links for each time that they move.

    Attributes:
        encoded: of the weights that are encoded.
        decoded: of their numbers, in their dtype.
        others: by name, of all other parameters.
    """

    encoded: int
    decoded: int
    others: dict[str, int]

    def __str__(self) -> str:
        rest = sum(self.others.values())
        share = self.encoded / self.decoded if self.decoded else 0.0
        return (
            f"{_core.format_bytes(self.encoded)} encoded ({share:.1%} of {_core.format_bytes(self.decoded)}), "
            f"{_core.format_bytes(rest)} of {len(self.others)} other parameters as they are"
        )


def encoded_bytes(model: nn.Module) -> EncodedBytes:
    """Counts the bytes of a model's parameters."""
    plain, encoded = split_parameters(model)
    return EncodedBytes(
        encoded=sum(part.nbytes for _, parts in encoded.values() for part in parts),
        decoded=sum(math.prod(each.sizes(parts)) * each.dtype.itemsize for each, parts in encoded.values()),
        others={name: parameter.nbytes for name, parameter in plain.items()},
    )
