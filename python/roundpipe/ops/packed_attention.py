"""Attention for packed rows, one document at a time: `attn_implementation="sdpa_packed"`.

A packed row holds several documents, and `position_ids` restart with each. transformers' own "sdpa" and "eager" build a
mask of [tokens, tokens] for such rows. Here, a document's queries meet only its own keys, so memory and time grow with
the documents instead of the square of the row. Importing this module registers the implementation:

    import roundpipe.ops.packed_attention
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa_packed")
    model(input_ids=ids, position_ids=positions, use_cache=False)

The implementation is also named "packed" for Gemma 2 and GPT-OSS, for which transformers refuses names with "sdpa".
Rows of one document with padding at either end take an `attention_mask` as usual; the padding attends to nothing and
gets zeros. Generation with a cache goes to transformers' "sdpa".

transformers looks for documents in `position_ids` only without a cache and without an `attention_mask`. Here,
`position_ids` always count, provided that the model passes them to its attention, as most models do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe import _core
from roundpipe.following.layers.evaluation_mode import evaluation_mode
from roundpipe.ops.documents import documents_of, note_table

NAME = "sdpa_packed"
# transformers refuses every name with "sdpa" in it for models whose scores SDPA cannot compute: Gemma 2, GPT-OSS.
OTHER_NAME = "packed"

# For a document that is longer than its window, or whose scores are computed here.
_QUERIES_AT_ONCE = _core.QUERIES_AT_ONCE


def register() -> None:
    """Registers "sdpa_packed" and "packed" with transformers. Importing the module does this; repeating it is safe."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (NAME, OTHER_NAME):
        AttentionInterface.register(name, packed_attention)
        AttentionMaskInterface.register(name, document_lengths)


def document_lengths(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Replaces the mask by the documents' lengths: which tokens of each row are a document. Called by transformers.

    Document boundaries come from `mask_function`: it tells for each token whether the token sees its predecessor.

    Returns:
        int32 of shape [batch, 1 + n], on the host: the sliding window or 0, then the lengths of the row's documents
        in order, with a run of padding as its negative length, then zeros. If a cache holds tokens already,
        transformers' boolean mask instead.

    Raises:
        ValueError: the mask is not causal, or was made by the model itself, or there is padding inside a row.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function: Any = causal_mask_function if mask_function is None else mask_function
    if q_length != kv_length or not _is_zero(q_offset) or not _is_zero(kv_offset):
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            **kwargs | {"allow_is_causal_skip": False},
        )
        assert mask is not None  # the shortcut is ruled out above
        return mask
    if use_vmap:
        raise ValueError(f"[{NAME}] the model adds to the causal mask, expected a plain one; {_OTHERWISE}")
    rows = torch.arange(batch_size, device=device)[:, None]
    before, after = torch.arange(q_length - 1, device=device)[None], torch.arange(1, q_length, device=device)[None]
    head = torch.zeros((1, 1), dtype=torch.long, device=device)
    begins = torch.ones((batch_size, q_length), dtype=torch.bool, device=device)
    begins[:, 1:] = ~function(rows, head, after, before)
    kept = torch.ones_like(begins) if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
    ahead = torch.zeros_like(begins)
    ahead[:, 1:] = function(rows, head, before, after)
    begins, kept, ahead = torch.stack([begins, kept, ahead]).cpu()  # together, since the host waits for the device
    if ahead.any():
        raise ValueError(f"[{NAME}] a token sees the one after it, expected a causal mask; {_OTHERWISE}")
    _check_padding(kept)
    begins[:, 1:] |= kept[:, 1:] != kept[:, :-1]
    lengths = []
    for row, row_kept in zip(begins, kept, strict=True):
        starts = row.nonzero().flatten().tolist()
        spans = zip(starts, [*starts[1:], q_length], strict=True)
        lengths.append([end - start if row_kept[start] else start - end for start, end in spans])
    most = max(len(row) for row in lengths)
    packed = [[local_size or 0, *row, *[0] * (most - len(row))] for row in lengths]
    table = torch.tensor(packed, dtype=torch.int32)
    note_table(table)
    return table


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each document. Called by transformers.

    Args:
        module: the model's attention module.
        query: [batch, heads, tokens, width].
        key: [batch, key heads, tokens, width]; `value` has the same shape.
        attention_mask: the result of `document_lengths`.
        dropout: dropout of the attention's weights.
        scaling: factor of the scores; None for 1 / sqrt(width).
        is_causal: must not be False.
        softcap: bound on the scores (Gemma 2). The scores are then computed without SDPA, some queries at a time.
        s_aux: a score for each head that takes its share of the softmax and adds nothing (GPT-OSS). Computed as with
            `softcap`.
        position_ids: if given, a document also ends where they do not increase by one.
        position_bias: not supported.

    Returns:
        [batch, tokens, heads, width], and no attention weights.

    Raises:
        ValueError: the mask belongs to another batch, or an option is not supported.
    """
    if attention_mask is None or attention_mask.dim() == 4:
        return _transformers_sdpa(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, kwargs)
    if position_bias is not None or is_causal is False or kwargs.get("output_attentions"):
        raise ValueError(
            f"[{NAME}] got position_bias, is_causal=False or output_attentions=True, expected none; {_OTHERWISE}"
        )
    documents = documents_of(attention_mask, position_ids, query.shape[0], query.shape[2])
    output = _core.packed_attention(query, key, value, documents, dropout, scaling, softcap, s_aux, _QUERIES_AT_ONCE)
    return output, None


def check_packing(model: Any) -> None:
    """Checks that samples in one row do not affect each other, by running two small rows.

    The rows end in the same sample and begin with different ones. Models with other connections along a row than
    attention (state space models, short convolutions) fail, and so do models loaded with another attention.

    Args:
        model: a causal language model, in the pipeline or plain. It is put into evaluation mode for the check.

    Raises:
        ValueError: samples affect each other, or the model computes inf or NaN.
    """
    text_config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, int(text_config.vocab_size), (2, 8), generator=generator)
    tokens[1] = tokens[0].roll(1)
    tokens[:, 5:] = tokens[0, 5:]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).repeat(2, 1)
    with evaluation_mode(model), torch.no_grad():
        own = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 5:]
    logits = own.float()
    if not logits.isfinite().all():
        raise ValueError(
            f"[check_packing] logits of {text_config.model_type} in {str(own.dtype).removeprefix('torch.')} are inf or "
            "NaN, expected numbers, which show whether samples in one row affect each other; if values of the model do "
            "not fit that type, load it in bfloat16 or float32"
        )
    difference = float((logits[0] - logits[1]).abs().max())
    if not difference <= 1e-2 * float(logits.abs().max()):
        raise ValueError(
            f"[check_packing] two samples in one row of {text_config.model_type} change each other (logits by "
            f"{difference:.2g}), expected none to see another; load the model with "
            f'attn_implementation="{OTHER_NAME}", or do not pack: give it a row a sample with an attention_mask'
        )


_OTHERWISE = 'use attn_implementation="sdpa" for this model'


def _is_zero(offset: Any) -> bool:
    return int(offset) == 0


def _check_padding(kept: torch.Tensor) -> None:
    runs = kept[:, 0].int() + (kept[:, 1:] & ~kept[:, :-1]).sum(dim=1)
    if (runs > 1).any():
        row = int((runs > 1).nonzero()[0])
        raise ValueError(
            f"[{NAME}] the attention_mask of row {row} has padding between tokens, expected it at the row's ends; for "
            "packed rows give position_ids that restart with each document, and no attention_mask"
        )


def _transformers_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Handles a mask of transformers' own kind: generation, or a mask that the caller made."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is not None or sinks is not None:
        raise ValueError(
            f"[{NAME}] softcap and s_aux are for training, without a cache and without a mask of four dimensions; "
            'use attn_implementation="eager" for this'
        )
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **options)
    return output, None


register()
