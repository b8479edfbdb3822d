"""Tiny language models with experts, of the families that have native layers, in odd configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import dense_models

_BASE: dict[str, Any] = {**dense_models.BASE, "head_dim": 8, "num_experts_per_tok": 2}
_GPT: dict[str, Any] = {**_BASE, "intermediate_size": 16, "sliding_window": 3, "num_local_experts": 5}
_GPT["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
_QWEN3: dict[str, Any] = {**_BASE, "num_experts": 5, "moe_intermediate_size": 16}

# By name: the family and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN3),
    # more experts than tokens choose, and one dense layer
    "qwen3_moe mixed": (
        "Qwen3Moe",
        {**_QWEN3, "num_experts": 40, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe all": (
        "Qwen3Moe",
        {**_QWEN3, "num_experts": 3, "num_experts_per_tok": 3, "hidden_act": "gelu"},
    ),
    "qwen3_moe one": (
        "Qwen3Moe",
        {**_QWEN3, "num_experts": 1, "num_experts_per_tok": 1, "sliding_window": 3, "attention_bias": True},
    ),
    "gpt_oss": ("GptOss", {**_GPT, "swiglu_limit": 0.7}),
    "gpt_oss all": ("GptOss", {**_GPT, "num_local_experts": 3, "num_experts_per_tok": 3, "attention_bias": False}),
    "gpt_oss one": ("GptOss", {**_GPT, "num_local_experts": 1, "num_experts_per_tok": 1, "swiglu_alpha": 0.5}),
}


def attention_of(name: str, attention: str) -> str:
    """The name that the model knows an attention by; with sinks, transformers refuses every name with "sdpa"."""
    return {"sdpa": "eager", "sdpa_packed": "packed"}.get(attention, attention) if "gpt" in name else attention


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model of which no weight is zero."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**changes, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif ".mlp." in path:
                parameter.normal_(std=0.2)
    return model.to(dtype)
