"""Compares a native layer's bits with those of the layer that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe import _core
from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.native import adapters
from roundpipe.following.native.check_fast import is_near_exact
from roundpipe.following.native.decoder import NativeDecoder, config_of
from roundpipe.following.native.experts import activation_path, family, numbers_of

# Of a layer with more bytes than this, the gradients of matrices are not compared: they would double its memory.
LARGE_BYTES = 64 << 20
_ROWS_AND_TOKENS = (2, 6)
_OF_A_LARGE_LAYER = (1, 3)


def kind_of(decoder: NativeDecoder) -> tuple[Any, ...]:
    """Equal for layers of which one needs to be compared."""
    layer, attention = decoder.layer, decoder.layer.self_attn
    path = activation_path(layer)
    activation = None if path is None else type(layer.get_submodule(path))
    routing = tuple(numbers_of(layer).values()) if decoder.has_experts else ()
    shapes = [layer.hidden_size, *((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())]
    epsilons = [getattr(module, "variance_epsilon", None) for module in layer.modules()]
    lora = adapters.numbers_of(layer)
    return (type(layer), attention.head_dim, attention.scaling, activation, routing, *lora, *shapes, *epsilons)


def reason_against_bits(decoder: NativeDecoder, attention: str, experts: str | None = None) -> str | None:
    """Runs the layer and its native form on the host, on a small input, in evaluation mode.

    Neither the layer nor torch's random state changes.

    Args:
        decoder: the layer.
        attention: the native name of its attention.
        experts: the native name of how its experts compute, if it has any.

    Returns:
        What differs; None if values and gradients have the same bits, with a mask and without, and if its arithmetic is
        fast, nearly the same numbers as with the exact one.
    """
    layer = ShadowTree(decoder.layer, {}).root
    layer.eval()
    weights = [parameter for _, parameter in decoder.layer.named_parameters()]
    is_large = sum(weight.numel() * weight.element_size() for weight in weights) > LARGE_BYTES
    rows, tokens = _OF_A_LARGE_LAYER if is_large else _ROWS_AND_TOKENS
    generator = torch.Generator().manual_seed(0)
    dtype = next((encoding.dtype for encoding in decoder.encodings.values()), weights[0].dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden = drawn(rows, tokens, decoder.layer.hidden_size).requires_grad_()
    has_sinks = family(layer) == "GptOss"
    table = decoder.layer.self_attn.head_dim // (2 if has_sinks else 1)
    angles = torch.rand((1, tokens, table), generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    seen = torch.ones((tokens, tokens), dtype=torch.bool).tril().expand(rows, 1, tokens, tokens).clone()
    seen[0, :, 1:, 0] = False
    if attention == "packed":
        seen = torch.tensor([[0, 2, tokens - 2]] * rows, dtype=torch.int32)
    if attention == "eager":
        seen = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    wanted = [hidden, *(w for w in weights if w.requires_grad and (w.dim() == 1 or not is_large))]
    outgoing = drawn(*hidden.shape)
    config = config_of(layer)
    with torch.inference_mode(False), torch.enable_grad():
        # With sinks, packed attention is always called with documents.
        for mask in (seen,) if is_large or (has_sinks and attention == "packed") else (seen, None):
            plain = layer(hidden, attention_mask=mask, position_embeddings=(cos, sin), use_cache=False)
            native = _core.decode(
                config,
                decoder.names,
                weights,
                hidden,
                cos,
                sin,
                mask,
                attention,
                experts=experts,
                encodings=decoder.encodings,
            )
            if not same_bits(plain, native):
                return "its values differ in bits from the layer's own"
            expected = torch.autograd.grad(plain, wanted, outgoing)
            if not all(map(same_bits, expected, torch.autograd.grad(native, wanted, outgoing))):
                return "its gradients differ in bits from the layer's own"
            if decoder.arithmetic == "fast":
                given = None if is_large else outgoing
                if not is_near_exact(decoder, layer, hidden, (cos, sin), mask, given, attention, experts):
                    return "in fast arithmetic, its results differ from the layer's own"
    return None


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = _INTEGERS[a.element_size()]
    return torch.equal(a.detach().contiguous().view(whole), b.detach().contiguous().view(whole))


def compare(decoders: Sequence[NativeDecoder], attention: str, experts: str) -> dict[int, str]:
    """Compares one layer of each kind.

    Returns:
        By number, why a layer's native form cannot stand for it.
    """
    found: dict[tuple[Any, ...], str | None] = {}
    reasons: dict[int, str] = {}
    for decoder in decoders:
        kind = kind_of(decoder)
        if kind not in found:
            try:
                found[kind] = reason_against_bits(decoder, attention, experts)
            except (RuntimeError, TypeError, ValueError) as error:  # such as sizes that do not fit
                found[kind] = f"it cannot be compared ({str(error).splitlines()[0]})"
        reason = found[kind]
        if reason is not None:
            reasons[decoder.number] = reason
    return reasons
