"""Unmerged outputs of a model: one value for each microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class RoundPipePackedData(list[Any]):
    """One leaf of a model's unmerged outputs: element i is the value of microbatch i.

    The next RoundPipe model accepts it anywhere among its arguments, and its microbatch i gets element i.

    Args:
        data: the values.
        transfer_event: two events for each value, for its own arrival and its gradient's; anything with
            `synchronize()`. A model's outputs have arrived when the call returns, and carry no events.
    """

    def __init__(self, data: Iterable[Any] = (), transfer_event: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(data)
        self.transfer_event = list(transfer_event)

    def synchronize(self) -> None:
        """Waits until every value has arrived."""
        for arrived, _ in self.transfer_event:
            arrived.synchronize()

    def rows(self) -> list[int] | None:
        """The number of rows in each microbatch, if all values are tensors with a first dimension; else None."""
        if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in self):
            return None
        return [value.size(0) for value in self]

    def __repr__(self) -> str:
        return f"RoundPipePackedData({super().__repr__()})"
