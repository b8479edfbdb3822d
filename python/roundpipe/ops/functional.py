"""A loss that never holds all logits, and feed-forward blocks that never hold all their intermediate results.

They run inside a layer of a RoundPipe model and in any other PyTorch code, on every device that PyTorch supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn

from roundpipe import _core

#: An elementwise operation on logits: `("multiply", s)`, `("divide", s)`, `"tanh"`, or the cast `"float32"`.
LogitStep: TypeAlias = Literal["tanh", "float32"] | tuple[Literal["multiply", "divide"], float]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]

Arithmetic = Literal["exact", "fast"]
"""The form in which native layers, heads and losses compute; see docs/performance.md."""
_FACTORS = {"multiply": _core.LogitStepKind.MULTIPLY, "divide": _core.LogitStepKind.DIVIDE}
_STEPS = {"tanh": _core.LogitStepKind.TANH, "float32": _core.LogitStepKind.FLOAT32}


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["sum", "mean", "none"] = "sum",
    softcap: float | None = None,
    scale: float | None = None,
    steps: Sequence[LogitStep] | None = None,
    chunk_tokens: int = 0,
    chunk_logit_bytes: int = 0,
    arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC,
) -> torch.Tensor:
    """The cross-entropy of a language model's head, without the logits of all tokens.

    Computes, for one chunk of tokens after another,

        logits = F.linear(hidden, weight, bias)
        for each step: logits = step(logits)
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=..., reduction=...)

    If autograd records, the same pass computes the gradients, because they need the same logits; the backward pass only
    scales them. Beside inputs and gradients, memory holds one chunk's logits, in fp32 and in the dtype of `hidden`. In
    16 bits, it also holds the weight's gradient in fp32 while the loss is computed.

    In 16 bits, logits are rounded as `F.linear` rounds them, the softmax is in fp32, and its gradient is rounded to 16
    bits before the matrix products. Each chunk's part of the weight's gradient is rounded by its matrix product, and
    the parts are summed in fp32. All this happens before `backward` applies its factor, so a loss scale does not help
    gradients below fp16's range. Under autocast, inputs are cast as `F.linear` casts them.

    Args:
        hidden: `[..., width]`, of dtype fp64, fp32, bf16 or fp16.
        weight: `[vocabulary, width]`, of the same dtype.
        labels: int64 `[...]`, from 0 to vocabulary - 1, or `ignore_index`. Checked on the CPU only.
        bias: `[vocabulary]`, of the same dtype.
        ignore_index: tokens with this label count neither in the loss nor in the mean.
        reduction: "sum" over the tokens that are not ignored, or their "mean", which is 0 if there are none. "none":
            the loss of each token, 0 for those that are ignored; the backward pass computes the logits again.
        softcap: the logits become `softcap * tanh(logits / softcap)`, as in Gemma 2 (arXiv:2408.00118, section 2).
        scale: first multiplies the logits, as in Cohere's models.
        steps: instead of `softcap` and `scale`, a model's own operations in their order, so that in 16 bits they
            round like the model's. Steps up to "float32" run in the dtype of `hidden`, later ones in fp32. Gemma 2:
            `[("divide", 30.0), "tanh", ("multiply", 30.0), "float32"]`.
        chunk_tokens: tokens in one chunk; 0 = as many as fit `chunk_logit_bytes`, but at most 4096, and at least 128
            (256 from a width of 1024).
        chunk_logit_bytes: bytes of fp32 logits in such a chunk; 0 = 64 MiB on the host and 1 GiB on a card. The chunks
            decide about the last bits of gradients.
        arithmetic: "fast": the softmax, the losses and the gradient of a chunk are one kernel over its logits, in their
            place, and sums of 16-bit products are not rounded where the device has such products. fp64 stays "exact".

    Returns:
        A scalar, or with "none" `[...]`, in fp32, or in fp64 if `hidden` is. Second derivatives (`create_graph`) are
        not supported.

    Raises:
        ValueError: shapes, dtypes, devices, labels or options do not fit; the message says which.
        RuntimeError: raised by `backward` with `create_graph`, or by a second `backward` without `retain_graph` before.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(
            f"[linear_cross_entropy] reduction is {reduction!r}, expected 'sum', 'mean' or 'none'; pass one of them"
        )
    options = _core.LinearCrossEntropyOptions()
    options.ignore_index = ignore_index
    options.chunk_tokens = chunk_tokens
    options.chunk_logit_bytes = chunk_logit_bytes
    options.arithmetic = arithmetic
    options.steps = _logit_steps(softcap, scale, steps)
    if reduction == "none":
        return _core.linear_cross_entropy_of_tokens(hidden, weight, bias, labels, options)
    total = _core.linear_cross_entropy(hidden, weight, bias, labels, options)
    if reduction == "sum":
        return total
    return total / (labels != ignore_index).sum().clamp(min=1)


def chunked_mlp(
    body: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    chunk_tokens: int,
    parameters: Iterable[torch.Tensor] | None = None,
    *,
    dim: int = -2,
    preserve_rng_state: bool = True,
) -> torch.Tensor:
    """Computes `body(hidden)` for `chunk_tokens` tokens at a time, forward and backward.

    Between forward and backward, only `hidden` and the result are held; the backward pass runs `body` again, one chunk
    at a time. Gradients of 16-bit parameters are summed over chunks in fp32. If `body` draws random numbers from the
    default generators (dropout), the second run of a chunk draws the same numbers.

    Args:
        body: a module or function that maps each token independently, such as a transformer's feed-forward block.
        hidden: `[..., tokens, width]`.
        chunk_tokens: tokens in one chunk, at least 1. With at most this many tokens, `body` simply runs once.
        parameters: the tensors beside `hidden` that `body` uses and that may need gradients. May be omitted for an
            `nn.Module` or its method; then they are the module's parameters.
        dim: the dimension of `hidden`, and of the result, that holds the tokens.
        preserve_rng_state: False skips saving the generators' states, for a body that draws nothing.

    Returns:
        The result of `body(hidden)`. Its backward pass cannot be differentiated (`create_graph`).

    Raises:
        ValueError: `chunk_tokens`, `dim` or the shape of `body`'s result does not fit, or `parameters` are missing.
        Exception: whatever `body` raises, here or in `backward`.
    """
    if parameters is None:
        owner = body if isinstance(body, nn.Module) else getattr(body, "__self__", None)
        if not isinstance(owner, nn.Module):
            raise ValueError(
                "[chunked_mlp] the body is not an nn.Module, so its parameters are unknown and would get no gradients; "
                "pass parameters=[...], the tensors that it uses, or parameters=[] if it uses none"
            )
        parameters = owner.parameters()
    options = _core.ChunkedMapOptions()
    options.chunk_tokens = chunk_tokens
    options.dim = dim
    options.preserve_rng_state = preserve_rng_state
    return _core.chunked_map(body, hidden, list(parameters), options)


def gated_mlp(
    hidden: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    chunk_tokens: int = 0,
) -> torch.Tensor:
    """`down(activation(gate(hidden)) * up(hidden))`, natively: Shazeer, "GLU Variants Improve Transformer" (2020).

    Args:
        hidden: `[..., tokens, width]`.
        gate_weight: `[inner, width]`, in the layout of `nn.Linear`, like the next two.
        up_weight: `[inner, width]`.
        down_weight: `[width, inner]`.
        gate_bias: `[inner]`.
        up_bias: `[inner]`.
        down_bias: `[width]`.
        activation: "silu", "gelu", "gelu_tanh" (gelu's approximation) or "relu".
        chunk_tokens: tokens in one chunk, see `chunked_mlp`; 0 = all at once, with autograd's own graph.

    Returns:
        `[..., tokens, width]`.

    Raises:
        ValueError: the activation has another name, or `chunk_tokens` is negative.
    """
    return _core.gated_mlp(
        hidden,
        _core.Projection(gate_weight, gate_bias),
        _core.Projection(up_weight, up_bias),
        _core.Projection(down_weight, down_bias),
        activation,
        chunk_tokens,
    )


def two_layer_mlp(
    hidden: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "gelu",
    chunk_tokens: int = 0,
) -> torch.Tensor:
    """`down(activation(up(hidden)))`, natively. Arguments, result and errors are those of `gated_mlp`."""
    return _core.two_layer_mlp(
        hidden,
        _core.Projection(up_weight, up_bias),
        _core.Projection(down_weight, down_bias),
        activation,
        chunk_tokens,
    )


def _logit_steps(
    softcap: float | None, scale: float | None, steps: Sequence[LogitStep] | None
) -> list[_core.LogitStep]:
    if steps is not None:
        if softcap is not None or scale is not None:
            raise ValueError(
                "[linear_cross_entropy] got steps together with softcap or scale, expected one or the other; "
                "write softcap and scale as steps"
            )
        return [_native_step(step) for step in steps]
    made = [] if scale is None else [_core.LogitStep(_core.LogitStepKind.MULTIPLY, scale)]
    return made if softcap is None else made + _core.softcap_steps(softcap)


def _native_step(step: LogitStep) -> _core.LogitStep:
    if isinstance(step, str) and step in _STEPS:
        return _core.LogitStep(_STEPS[step])
    if isinstance(step, tuple) and len(step) == 2 and step[0] in _FACTORS:
        return _core.LogitStep(_FACTORS[step[0]], step[1])
    raise ValueError(
        f"[linear_cross_entropy] a step is {step!r}, expected ('multiply', s), ('divide', s), 'tanh' or 'float32'; "
        "write the model's operations on its logits with these"
    )
