"""Moving and casting modules whose weights are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe import _core


def apply_to_parts(
    module: nn.Module,
    names: list[str],
    encodings: list[_core.Encoding],
    function: Callable[[torch.Tensor], torch.Tensor],
    others: Callable[[], Any],
) -> None:
    """Does what `nn.Module._apply` does, which is behind `to`, `half` and `cuda`.

    Parts move to another device, and keep their dtypes: scales are no weights.

    Args:
        names: of the parameters that are parts.
        function: what to apply.
        others: applies it to all other parameters.

    Raises:
        ValueError: it casts weights to another dtype.
    """
    for encoding in encodings:
        cast = function(torch.empty(0, dtype=encoding.dtype)).dtype
        if cast != encoding.dtype:
            raise ValueError(
                f"[quantise] weights that decode to {encoding.dtype} were to become {cast}, expected the dtype that "
                "they were encoded with; cast the model first, then encode it"
            )
    parts = {name: module._parameters.pop(name) for name in names}
    try:
        others()
        for name, part in parts.items():
            assert part is not None
            moved = function(part.data)
            if moved.dtype != part.dtype:
                moved = part.data.to(moved.device)
            if torch._has_compatible_shallow_copy_type(part, moved):
                part.data = moved
            else:
                parts[name] = nn.Parameter(moved, requires_grad=False)
    finally:
        module._parameters.update(parts)
