"""Checksums of tensors: of host memory, and made by the device that holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from roundpipe import _core

# The device's checksum has a number for each piece of this many bytes. Its temporaries are sixteen times as large.
_PIECE_BYTES = 1 << 16
_MULTIPLIER = 2654435761  # Knuth's: neighbouring bytes get unlike weights
_COPIES = 3


def crc32c(tensors: Iterable[Tensor]) -> int:
    """CRC-32C of all bytes of dense tensors, one after the other."""
    crc = 0
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = _core.crc32c(content.numpy().tobytes(), crc)
    return crc


def weighted_sums(tensor: Tensor) -> Tensor:
    """For each piece of a dense tensor, the sum of its bytes, each times a weight of its place. int64 [pieces].

    Computed where the tensor lies, in integers, so that every device gives the same numbers. A byte that changes
    always changes its sum.
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    places = torch.arange(1, _PIECE_BYTES + 1, device=content.device)
    # At most 2^31 * 2^8 * 2^16, which int64 holds.
    weights = (places * _MULTIPLIER) % 0x7FFFFFFF
    sums = [(piece.long() * weights[: len(piece)]).sum() for piece in torch.split(content, _PIECE_BYTES)]
    return torch.stack(sums)


def copies(sums: Tensor) -> Tensor:
    """What travels back in place of checksums, so that an error on their own way can be told from one before."""
    return sums.expand(_COPIES, -1).contiguous()


def majority(received: Tensor) -> Tensor:
    """The checksums that most of the `copies` hold."""
    return received.median(dim=0).values
