"""State dicts whose tensors have storages of their own, though they lie in one block of memory.

accelerate and safetensors take tensors of one storage for one tensor and save it once; torch.save saves whole storages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def with_own_storages(state: Any) -> Any:
    """Gives each detached tensor of a state dict that is a part of a larger storage a storage over its own memory.

    Values and their version counters are still those of the parameters. Parameters themselves (`keep_vars=True`) and
    other values stay as they are.
    """
    if not isinstance(state, dict):
        return state
    for value in state.values():
        if (
            isinstance(value, torch.Tensor)
            and not isinstance(value, nn.Parameter)
            and not value.requires_grad
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.is_contiguous()
            and 0 < value.nbytes < value.untyped_storage().nbytes()
        ):
            _move_to_own_storage(value)
    return state


def _move_to_own_storage(tensor: torch.Tensor) -> None:
    memory = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())  # keeps the block alive
    tensor.data = memory.view(tensor.dtype).view(tensor.shape)
