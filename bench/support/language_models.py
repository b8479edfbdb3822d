"""Language models with random weights, in shapes that people train."""

from __future__ import annotations

from typing import Any

import torch
from support.published_models import MODELS
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

# As their published configs have them.
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "1.7B": MODELS["Qwen3-1.7B"].sizes,
    "4B": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "32B": MODELS["Qwen3-32B"].sizes,
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def qwen3(shape: str, longest: int, dtype: torch.dtype, device: torch.device) -> Qwen3ForCausalLM:
    """A model on the host, the same weights for the same `device`, which draws them: it is quicker than the host."""
    config = Qwen3Config(**SHAPES[shape] | {"max_position_embeddings": longest}, attn_implementation="sdpa")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = Qwen3RotaryEmbedding(config)  # its buffers have values, which the meta device lost
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
                parameter.copy_(drawn.normal_(0, 0.02, generator=generator))
    return model


class _Decoder(nn.Module):
    """One layer on (hidden, labels), causal, with positions of its own."""

    def __init__(self, layer: nn.Module, config: Qwen3Config) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, labels = value
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embedded = self.rotary(hidden, positions)
        return self.layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=embedded), labels


class _Embedding(nn.Module):
    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(tokens), labels


class _Head(nn.Module):
    """The mean loss over the rows of a microbatch."""

    def __init__(self, model: Qwen3ForCausalLM, loss: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.head = model.lm_head
        self.loss = loss

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, labels = value
        return self.loss(self.norm(hidden), self.head, labels)


def as_chain(model: Qwen3ForCausalLM, loss: Any) -> nn.Sequential:
    """The model's own parts as a chain of layers, for a library that does not know the model's class.

    `loss(hidden, head, labels)` shifts the labels itself.
    """
    decoders = [_Decoder(layer, model.config) for layer in model.model.layers]
    return nn.Sequential(_Embedding(model), *decoders, _Head(model, loss))
