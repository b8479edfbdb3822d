"""How much arithmetic a training step needs, by one formula for everybody.

Six operations for each weight of a matrix and token (two forward, four backward), and causal attention: a token meets
half of the row on average, in two products of heads x head_dim each, forward once and backward twice. What a system
computes again in its backward does not count, nor do embeddings that are only looked up, nor experts that a token does
not visit; in a layer with a window, a token meets as many others as the window has. With adapters on frozen weights, no
gradient of the frozen ones is made: four operations for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepFlops:
    """Of a model: for each token, and for each token and position of its row."""

    per_token: float
    per_token_and_position: float

    def of_rows(self, rows: int, tokens: int) -> float:
        """A step over `rows` rows of `tokens` tokens."""
        return rows * tokens * (self.per_token + self.per_token_and_position * tokens)


def step_flops(model: Any) -> StepFlops:
    """Of a causal language model of transformers, with adapters of PEFT or without.

    Args:
        model: on any device, the meta device included.
    """
    config = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    visited = config.num_experts_per_tok / experts if experts else 1.0
    named = list(model.named_parameters(remove_duplicate=False))
    adapters = any(not parameter.requires_grad for _, parameter in named)
    per_token = 0.0
    for name, parameter in named:
        if parameter.dim() < 2 or "embed_tokens" in name:
            continue
        operations = 4 if adapters and not parameter.requires_grad else 6
        per_token += operations * (visited if ".experts." in name else 1.0) * parameter.numel()
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    windowed = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    per_token += 12.0 * windowed * width * (config.sliding_window if windowed else 0)
    return StepFlops(per_token, 6.0 * (config.num_hidden_layers - windowed) * width)
