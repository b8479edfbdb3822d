"""Models with batches for tests of memory: transformers, mixtures of experts, pictures and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe


class Case:
    """A model with a batch that goes with it."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any], label: Any = None, loss: Any = None) -> None:
        self.model = model
        self.kwargs = kwargs
        self.label = label
        self.loss = loss

    def wrap(self, microbatches: int, gradient_groups: int = 1, **options: Any) -> RoundPipe:
        config = RoundPipeRunConfig(num_microbatch=microbatches, gradient_groups=gradient_groups)
        if self.loss is None:
            return wrap_model_to_roundpipe(self.model, model_run_config=config, **options)
        return RoundPipe(self.model, model_run_config=config, **options)

    def step(self, pipe: RoundPipe) -> Any:
        if self.loss is None:
            return pipe.forward_backward((), self.kwargs)
        return pipe.forward_backward((self.kwargs["x"],), label=self.label, loss_fn=self.loss)

    def predict(self, pipe: RoundPipe, **options: Any) -> Any:
        if self.loss is None:
            return pipe.predict_memory((), self.kwargs, **options)
        return pipe.predict_memory((self.kwargs["x"],), label=self.label, loss_fn=self.loss, **options)


def llama(width: int, layers: int, vocabulary: int, rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    ids = torch.randint(0, vocabulary, (rows, tokens))
    return Case(LlamaForCausalLM(config).to(dtype), {"input_ids": ids, "labels": ids})


def mixture(width: int, experts: int, layers: int, rows: int, tokens: int) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        num_local_experts=experts,
    )
    ids = torch.randint(0, 1000, (rows, tokens))
    return Case(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})


def pictures(counts: list[int], side: int, patch: int = 8) -> Case:
    """A LLaVA, and a row for each number of pictures."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    token, of_each, tokens = 499, (side // patch) ** 2, 160
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=500),
            vision_config=CLIPVisionConfig(**sizes, image_size=side, patch_size=patch),
            image_token_id=token,
            vision_feature_layer=-1,
        )
    )
    ids = torch.randint(0, token, (len(counts), tokens))
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + count * of_each] = token
    pixels = torch.randn(sum(counts), 3, side, side)
    return Case(model, {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100), "pixel_values": pixels})


class Residual(nn.Module):
    """Three convolutions with batch norm, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(3):
            parts += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        self.parts = nn.Sequential(*parts)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.parts(value)


def convolutions(channels: int, side: int, blocks: int, rows: int) -> Case:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    first = nn.Conv2d(3, channels, 3, padding=1)
    model = nn.Sequential(first, *[Residual(channels) for _ in range(blocks)], head)
    label = torch.randint(0, 10, (rows,))
    return Case(model, {"x": torch.randn(rows, 3, side, side)}, label, nn.functional.cross_entropy)


CASES: dict[str, Callable[[], Case]] = {
    "llama 64": lambda: llama(64, 4, 500, 8, 64),
    "llama 128": lambda: llama(128, 4, 1000, 6, 128),
    "llama 256": lambda: llama(256, 3, 2000, 6, 128),
    "llama with a large vocabulary": lambda: llama(128, 4, 8000, 6, 128),
    "llama in bf16": lambda: llama(256, 4, 1000, 6, 128, torch.bfloat16),
    "mixture 64": lambda: mixture(64, 4, 3, 6, 64),
    "mixture 128": lambda: mixture(128, 4, 4, 6, 128),
    "mixture of eight": lambda: mixture(128, 8, 3, 6, 64),
    "mixture of two": lambda: mixture(256, 2, 3, 6, 64),
    "mixture of 16": lambda: mixture(64, 16, 3, 6, 128),
    "pictures": lambda: pictures([1] * 6, 48),
    "pictures in some rows": lambda: pictures([1, 0, 2, 1, 0, 0], 64),
    "large pictures": lambda: pictures([1, 1, 1], 96),
    "conv 8": lambda: convolutions(8, 32, 4, 12),
    "conv 16": lambda: convolutions(16, 32, 4, 12),
    "conv 32": lambda: convolutions(32, 16, 6, 12),
    "conv 64": lambda: convolutions(64, 16, 4, 12),
    "conv 32, larger pictures": lambda: convolutions(32, 32, 6, 12),
}


IN_EVERY_RUN = {
    "llama 64",
    "llama with a large vocabulary",
    "llama in bf16",
    "mixture 64",
    "mixture of 16",
    "pictures in some rows",
    "conv 8",
}
EACH_CASE = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.long) for name in CASES]
