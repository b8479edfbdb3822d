"""Parts of models, computed natively with less memory than their plain forms.

    from roundpipe.models import chunked_mlp, linear_cross_entropy

Each computes what the plain PyTorch code in its docstring computes, and its gradients; see `functional`.
"""

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
]
