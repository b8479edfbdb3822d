"""Parts of models, computed natively with less memory than their plain forms.

    from roundpipe.models import chunked_mlp, linear_cross_entropy

Each computes what the plain PyTorch code in its docstring computes, and its gradients; see `functional`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from roundpipe.models.functional import (
    LogitStep,
    chunked_mlp,
    gated_mlp,
    linear_cross_entropy,
    two_layer_mlp,
)

__all__ = [
    "LogitStep",
    "chunked_mlp",
    "gated_mlp",
    "linear_cross_entropy",
    "two_layer_mlp",
    "wrap_model",
]


def wrap_model(model: nn.Module, **roundpipe_kwargs: Any) -> Any:
    """`wrap_model_to_roundpipe` with `use_sequential_preset=True`, under the published package's name."""
    from roundpipe.wrap import wrap_model_to_roundpipe

    return wrap_model_to_roundpipe(model, use_sequential_preset=True, **roundpipe_kwargs)
