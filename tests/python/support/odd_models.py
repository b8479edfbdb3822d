"""A causal language model of nobody's: what it does between its layers, and what it hands them, is the test's.

Its layers write notes of several kinds, and its forward does what `between` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from causal_models import VOCABULARY


class OddConfig(PreTrainedConfig):
    model_type = "odd"

    def __init__(self, **kwargs: Any) -> None:
        self.hidden_size = 16
        self.num_hidden_layers = 3
        self.vocab_size = VOCABULARY
        super().__init__(**kwargs)


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, states: torch.Tensor, notes: Any = None) -> torch.Tensor:
        result = states + torch.tanh(self.linear(states))
        if isinstance(notes, list):
            notes.append(result.detach().mean())
        elif isinstance(notes, Box):
            notes.kept = result
        elif notes is not None:
            notes["sum"] = notes["sum"] + result if "sum" in notes else result
            result = result + 0.1 * notes["sum"]
        return result


class Box:
    kept: torch.Tensor | None = None


Between = Callable[["OddForCausalLM", torch.Tensor, int], torch.Tensor]


class OddForCausalLM(PreTrainedModel, GenerationMixin):
    """Does `between` after each layer, and gives each layer the same new `notes`."""

    config_class = OddConfig

    def __init__(
        self, config: OddConfig, between: Between | None = None, notes: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(OddLayer() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(16))
        self.head = nn.Linear(16, VOCABULARY)
        self.between = between
        self.notes = notes
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        states = self.first = self.embed(input_ids)
        notes = self.notes() if self.notes else None
        for index, layer in enumerate(self.layers):
            states = layer(states) if notes is None else layer(states, notes=notes)
            if self.between is not None:
                states = self.between(self, states, index)
        logits = self.head(states)
        loss = None if labels is None else self.loss_function(logits, labels, VOCABULARY, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def odd(between: Between | None = None, notes: Callable[[], Any] | None = None) -> OddForCausalLM:
    """With the same weights each time."""
    torch.manual_seed(0)
    return OddForCausalLM(OddConfig(), between, notes)
