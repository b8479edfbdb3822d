"""A Llama as a chain of layers that is written out, where following it is not what is tested."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class Decoder(nn.Module):
    """One decoder layer with its own rotary embedding and causal attention.

    Maps hidden states [batch, sequence, width] to the same shape; positions count from 0 in every row.
    """

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotation = self.rotary(hidden, position_ids=positions)
        # Scaled dot product attention is causal if it gets no mask.
        output: Tensor = self.layer(hidden, attention_mask=None, position_embeddings=rotation, position_ids=positions)
        return output


def as_layers(llama: LlamaForCausalLM) -> nn.Sequential:
    """Tokens [batch, sequence] int64 -> logits [batch, sequence, vocabulary], with the modules of `llama`."""
    return nn.Sequential(
        llama.model.embed_tokens,
        *(Decoder(layer, llama.config) for layer in llama.model.layers),
        llama.model.norm,
        llama.lm_head,
    )
