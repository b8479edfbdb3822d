"""A small Llama, as the pipeline's list of layers and as the Hugging Face model that provides them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from roundpipe.demo.tokenizer import END_OF_FILE
from roundpipe.huggingface.quiet import without_progress_bars


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


class Head(nn.Module):
    """Final norm and projection: hidden states [batch, sequence, width] -> logits [batch, sequence, vocabulary]."""

    def __init__(self, norm: nn.Module, projection: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


def build_llama(vocabulary_size: int, longest_sequence: int, seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of about five million parameters, initialized in float32 from `seed` and then cast to `dtype`."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest_sequence,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        llama: LlamaForCausalLM = LlamaForCausalLM(config)
    with torch.no_grad():
        # Layers that start close to the identity learn faster in such a short run.
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    # `llama.to(dtype)` would also cast the rotary frequencies, a buffer, to 8 bits of mantissa.
    for parameter in llama.parameters():
        parameter.data = parameter.data.to(dtype)
    return llama


def as_layers(llama: LlamaForCausalLM) -> nn.Sequential:
    """The same modules as a Sequential: tokens [batch, sequence] int64 -> logits [batch, sequence, vocabulary].

    Parameters are shared with `llama`, so training one trains the other.
    """
    return nn.Sequential(
        llama.model.embed_tokens,
        *(Decoder(layer, llama.config) for layer in llama.model.layers),
        Head(llama.model.norm, llama.lm_head),
    )


def save_model(folder: Path, llama: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes a folder that transformers loads, with the tokenizer. Replaces an earlier one."""
    fast: Any = PreTrainedTokenizerFast
    with without_progress_bars():
        llama.save_pretrained(folder)
        fast(tokenizer_object=tokenizer, eos_token=END_OF_FILE).save_pretrained(folder)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def training_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that plain training with Adam keeps: weights, gradients, and float32 optimizer state.

    The state is two moments, and a float32 master copy if the weights have a smaller type.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    state = sum(parameter.numel() * (8 if parameter.dtype == torch.float32 else 12) for parameter in model.parameters())
    return {"weights": weights, "gradients": weights, "optimizer state": state}
