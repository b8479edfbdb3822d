"""Losses of causal language models, under the published package's names.

They compute the same as transformers' loss of a causal language model; `linear_cross_entropy` computes the chunks.
Despite the names, which scripts import, nothing is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.ops.functional import linear_cross_entropy

#: Number of tokens whose logits `ChunkedCompileLinearForCausalLMLoss` holds at a time.
TOKEN_CHUNK_SIZE = 4096


def CompileCrossEntropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sum of the tokens' cross-entropies, in fp32: `[tokens, vocabulary]` logits and `[tokens]` labels."""
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")


def CompileLinearCrossEntropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """`CompileCrossEntropy` of the logits `F.linear(hidden_states, weight, bias)`."""
    return CompileCrossEntropy(F.linear(hidden_states, weight, bias), labels, ignore_index)


def CompileForCausalLMLoss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of a causal language model: the sum over its tokens, divided by their number.

    Args:
        logits: `[..., tokens, vocab_size]`.
        labels: `[..., tokens]`; token i predicts label i + 1. Ignored if `shift_labels` are given.
        vocab_size: number of logits of a token.
        num_items_in_batch: divisor of the sum; by default the number of labels that count here.
        ignore_index: a label that does not count.
        shift_labels: `[..., tokens]`, the label that each token predicts.
        **kwargs: further arguments that a model passes to its loss; not used.
    """
    targets, count = _targets(labels, shift_labels, num_items_in_batch, ignore_index, logits.device)
    return CompileCrossEntropy(logits.reshape(-1, vocab_size), targets, ignore_index) / count


def ChunkedCompileLinearForCausalLMLoss(
    hidden_states: torch.Tensor,
    lm_head: nn.Linear,
    labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`CompileForCausalLMLoss` of `lm_head(hidden_states)`, with the logits of `TOKEN_CHUNK_SIZE` tokens at a time.

    Args:
        hidden_states: `[..., tokens, width]`.
        lm_head: its weight and bias make the logits; its forward is not called.
        labels: see `CompileForCausalLMLoss`; the same holds for the arguments below.
        num_items_in_batch: see there.
        ignore_index: see there.
        shift_labels: see there.
        **kwargs: see there.
    """
    targets, count = _targets(labels, shift_labels, num_items_in_batch, ignore_index, hidden_states.device)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    total = linear_cross_entropy(
        flat, lm_head.weight, targets, lm_head.bias, ignore_index=ignore_index, chunk_tokens=TOKEN_CHUNK_SIZE
    )
    return total / count


def _targets(
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
    ignore_index: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """The label that each token predicts, `[tokens]` on `device`, and the divisor of the sum of the losses."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("[models.function] there are neither labels nor shift_labels, expected one of them")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(device)
    if num_items_in_batch is None:
        return targets, (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        return targets, num_items_in_batch.to(device)
    return targets, num_items_in_batch
