"""Compares a native layer in fast arithmetic with the same layer in exact one."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.following.native.decoder import NativeDecoder, config_of
from roundpipe.ops.functional import Arithmetic
from roundpipe.quantise.modules import decoded_parameters


def is_near_exact(
    decoder: NativeDecoder,
    layer: Any,
    hidden: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    outgoing: torch.Tensor | None,
    attention: str,
    experts: str | None,
) -> bool:
    """Whether the two differ by their roundings alone.

    Args:
        layer: the decoder's, in evaluation mode.
        outgoing: the gradient of the result; then gradients are compared as well, and all in fp32, since roundings to
            16 bits let routers and gates choose otherwise. None: only the results of most tokens, in the layer's dtype.
    """
    names, encodings = decoder.names, decoder.encodings
    inputs = [hidden, *(parameter for _, parameter in decoder.layer.named_parameters())]
    if outgoing is not None:
        if encodings:
            decoded = decoded_parameters(decoder.layer)
            names, encodings = [name for name, _ in decoded], {}
            inputs = [hidden, *(values for _, values in decoded)]
        inputs = [each.detach().float().requires_grad_() for each in inputs]
    cos, sin = (table.to(inputs[0].dtype) for table in tables)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(inputs[0].dtype)

    def results(arithmetic: Arithmetic) -> list[torch.Tensor]:
        config = config_of(layer, arithmetic)
        states, weights = inputs[0], inputs[1:]
        result = _core.decode(
            config,
            names,
            weights,
            states,
            cos,
            sin,
            mask,
            attention,
            experts=experts,
            encodings=encodings,
        )
        if outgoing is None:
            return [result]
        return [result, *torch.autograd.grad(result, inputs, outgoing.float(), materialize_grads=True)]

    near = tokens_are_near if outgoing is None else are_near
    with torch.autocast("cpu", enabled=False):  # whose roundings would be taken for mistakes
        return all(map(near, results("fast"), results("exact")))


def _distances(a: torch.Tensor, b: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Norms of the difference beside what roundings explain: mistakes are larger, and attention may amplify some."""
    most = max(1e-3, 32 * torch.finfo(b.dtype).eps)
    a, b = a.detach().double(), b.detach().double()
    distance: torch.Tensor = torch.linalg.vector_norm(a - b, dim=dim)
    size: torch.Tensor = torch.linalg.vector_norm(b, dim=dim)
    return distance / (most * size + torch.finfo(torch.float32).tiny)


def are_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two forms of one result differ by their roundings alone."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(_distances(a, b, None) <= 1)


def tokens_are_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Likewise, for most tokens: a router may choose otherwise for a few."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(_distances(a, b, -1).median() <= 1)
