"""Tiny dense language models of the families that have native layers, in odd configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ODD: dict[str, Any] = {"head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3}

# By name: the family and what differs from BASE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama one key head": ("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama no groups": ("Llama", {"num_key_value_heads": 4, "hidden_act": "relu"}),
    "llama odd heads": ("Llama", {**ODD, "hidden_act": "swish"}),
    "llama wide heads": ("Llama", {"head_dim": 260, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 3, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3 odd heads": ("Qwen3", ODD),
}


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model whose biases and norms are random too."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)
