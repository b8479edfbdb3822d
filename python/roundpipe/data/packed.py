"""What a model hands on unmerged: one value of each microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class RoundPipePackedData(list[Any]):
    """One leaf of a model's outputs that were not merged: element i is that of microbatch i.

    The next RoundPipe model takes it anywhere among its arguments: its microbatch i gets element i.

    Args:
        data: the values.
        transfer_event: for each value two events, of its own arrival and of its gradient's; anything with
            `synchronize()`. A model's outputs have arrived when the call returns, and carry none.
    """

    def __init__(self, data: Iterable[Any] = (), transfer_event: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(data)
        self.transfer_event = list(transfer_event)

    def synchronize(self) -> None:
        """Waits until every value is there."""
        for arrived, _ in self.transfer_event:
            arrived.synchronize()

    def rows(self) -> list[int] | None:
        """How many rows each microbatch has, where all values are tensors with a first dimension."""
        if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in self):
            return None
        return [value.size(0) for value in self]

    def __repr__(self) -> str:
        return f"RoundPipePackedData({super().__repr__()})"
