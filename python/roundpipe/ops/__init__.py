"""Parts of models, computed natively with less memory than in their plain forms.

    from roundpipe.ops import chunked_mlp, linear_cross_entropy

Each function computes the result and the gradients of the plain PyTorch code in its docstring; see `functional`.
"""

from roundpipe.ops.functional import (
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
]
