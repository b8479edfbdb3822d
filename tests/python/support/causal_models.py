"""Tiny causal language models of many architectures, with the configs of the installed transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
LENGTH = 64

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {**_GPT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
_GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_OPT = {**_GPT, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_OPT |= {"dropout": 0.0, "max_position_embeddings": LENGTH, "word_embed_proj_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def _from(family: str, **options: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        config = getattr(transformers, f"{family}Config")(**options)
        name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family.removesuffix('Text')}ForCausalLM")
        model: PreTrainedModel = getattr(transformers, name)(config)
        return model

    return make


WITH_PRESET: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _from("Llama", **_LLAMA),
    "qwen3": _from("Qwen3", **_LLAMA, head_dim=8),
    "qwen3_moe": _from("Qwen3Moe", **_LLAMA, **_EXPERTS),
    "gpt_oss": _from(
        "GptOss",
        **_LLAMA,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=_SLIDING,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
    ),
}

WITHOUT_PRESET: dict[str, Callable[[], PreTrainedModel]] = {
    # learned positions, tied embeddings, Conv1D
    "gpt2": _from(
        "GPT2", **_GPT, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    # attention and MLP in parallel
    "gpt_neox": _from("GPTNeoX", **{**_LLAMA, "num_key_value_heads": None}, use_parallel_residual=True),
    "phi": _from("Phi", **{**_LLAMA, "num_key_value_heads": 4}),
    "cohere2": _from("Cohere2", **_LLAMA, sliding_window=4, layer_types=_SLIDING, logit_scale=0.25),
    # sliding and full masks mixed, soft-capped logits, tied embeddings
    "gemma2": _from("Gemma2", **_LLAMA, head_dim=8, sliding_window=4, final_logit_softcapping=3.0),
    "gemma3": _from("Gemma3Text", **_LLAMA, head_dim=8, sliding_window=4, layer_types=_SLIDING),
    # an input of its own for each layer, keys and values that layers share
    "gemma3n": _from(
        "Gemma3nText",
        **_LLAMA,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=1,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
    ),
    # labels that are not shifted
    "bart": _from("Bart", **_OPT, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=48, is_decoder=True),
    "mistral": _from("Mistral", **_LLAMA, sliding_window=4),
    "olmo2": _from("Olmo2", **_LLAMA),
    "granite": _from("Granite", **_LLAMA, logits_scaling=3.0, residual_multiplier=0.5),
    # no rotary embedding: positions are in the attention's bias
    "bloom": _from("Bloom", **_GPT, hidden_size=32, n_layer=3, n_head=4),
    "opt": _from("OPT", **_OPT),
    # shared experts
    "qwen2_moe": _from(
        "Qwen2Moe",
        **_LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
    "deepseek_v3": _from(
        "DeepseekV3",
        **{**_LLAMA, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    # linear attention and full attention mixed
    "qwen3_next": _from(
        "Qwen3Next",
        **_LLAMA,
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
ALL = WITH_PRESET | WITHOUT_PRESET


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights; biases and norms random, too, so that none hides a mistake."""
    torch.manual_seed(seed)
    model = ALL[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def tokens(rows: int = 4, length: int = 9, seed: int = 1) -> torch.Tensor:
    """int64 [rows, length], without the special tokens."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded_batch(rows: int = 4, length: int = 9) -> dict[str, torch.Tensor]:
    """Rows of uneven lengths, padded on the right; some labels ignored."""
    ids = tokens(rows, length)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - (2 * row) % (length - 3) :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed_batch(rows: int = 4, length: int = 9) -> dict[str, torch.Tensor]:
    """Two samples in a row, whose positions restart."""
    ids = tokens(rows, length)
    first = length // 2
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(rows, -1).contiguous()
    labels = ids.clone()
    labels[:, first] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


BATCHES = {"padded": padded_batch, "packed": packed_batch}
