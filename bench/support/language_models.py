"""Language models with random weights, in shapes that people train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.published_models import MODELS
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


@dataclass(frozen=True)
class Shape:
    """Of a model: the kind that transformers knows, and its sizes."""

    kind: str
    sizes: dict[str, Any]
    lora: bool = False  # trained by adapters only


_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
_PUBLISHED = {
    "1.7B": "Qwen3-1.7B",
    "8B": "Llama-3.1-8B",
    "20B": "gpt-oss-20b",
    "32B": "Qwen3-32B",
    "235B": "Qwen3-235B-A22B",
}
# As their published configs have them, and tiny ones of the same kinds.
SHAPES: dict[str, Shape] = {
    **{size: Shape(MODELS[name].kind, MODELS[name].sizes, MODELS[name].lora) for size, name in _PUBLISHED.items()},
    "4B": Shape("qwen3", _QWEN3 | _4B | {"tie_word_embeddings": True}),
    "tiny": Shape("qwen3", _TINY | {"tie_word_embeddings": True}),
    "tiny-moe": Shape(
        "qwen3_moe",
        _TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
        lora=True,
    ),
}
TINY_OF = {size: "tiny-moe" if SHAPES[size].lora else "tiny" for size in ("1.7B", "4B", "8B", "20B", "32B", "235B")}
# What the published system's adapters are put on (arXiv:2604.27085 trains 235B so).
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]


def configuration(shape: str, longest: int, layers: int = 0) -> PretrainedConfig:
    """Of transformers, for rows of up to `longest` tokens and `layers` decoder layers; 0: all."""
    found = SHAPES[shape]
    changes = {"max_position_embeddings": longest} | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model(found.kind, **found.sizes | changes)
    config._attn_implementation = "eager" if found.kind == "gpt_oss" else "sdpa"  # its sinks have no fused form there
    return config


def language_model(
    shape: str, longest: int, dtype: torch.dtype, device: torch.device, layers: int = 0, shared_base: bool = False
) -> Any:
    """A model on the host, the same weights for the same `device`, which draws them: it is quicker than the host.

    Args:
        shape: of SHAPES.
        longest: tokens of its rows.
        dtype: of the weights.
        device: draws them.
        layers: decoder layers, where not all of the shape's.
        shared_base: all decoder layers have the parameters of the first.
    """
    config = configuration(shape, longest, layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if shared_base:
        _share_layers(model)
    rotary = type(model.model.rotary_emb)
    model.to_empty(device="cpu")
    model.tie_weights()
    if shared_base:  # moved one by one, they are no longer the same
        _share_layers(model)
    model.model.rotary_emb = rotary(config)  # its buffers have values, which the meta device lost
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1 if name.endswith("norm.weight") else 0)
            else:
                drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
                parameter.copy_(drawn.normal_(0, 0.02, generator=generator))
    return model


def _share_layers(model: Any) -> None:
    first, *others = model.model.layers
    for layer in others:
        for name, parameter in first.named_parameters():
            owner, _, own = name.rpartition(".")
            setattr(layer.get_submodule(owner), own, parameter)


def with_adapters(model: Any, rank: int) -> Any:
    """Adapters of PEFT on the attention's projections; the base is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=ADAPTED, task_type="CAUSAL_LM"))


class _Decoder(nn.Module):
    """One layer on (hidden, labels), causal, with positions of its own."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, labels = value
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embedded = self.rotary(hidden, positions)
        return self.layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=embedded), labels


class _Embedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(tokens), labels


class _Head(nn.Module):
    """The mean loss over the rows of a microbatch."""

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.head = model.lm_head
        self.loss = loss

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, labels = value
        return self.loss(self.norm(hidden), self.head, labels)


def as_chain(model: Any, loss: Any) -> nn.Sequential:
    """The model's own parts as a chain of layers, for a library that does not know the model's class.

    `loss(hidden, head, labels)` shifts the labels itself.
    """
    rotary = type(model.model.rotary_emb)
    decoders = [_Decoder(layer, rotary(model.config)) for layer in model.model.layers]
    return nn.Sequential(_Embedding(model), *decoders, _Head(model, loss))


class WithLoss(nn.Module):
    """A model and its loss, in chunks, as one module: the mean over the tokens of its rows, [rows, tokens] of ids.

    For systems that hook a module's forward: the head is used inside it.
    """

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.loss(hidden, self.model.lm_head.weight, ids)
