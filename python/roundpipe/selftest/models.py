"""Small language models: a chain of plain PyTorch layers, and a Llama of transformers where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundpipe import RoundPipe, wrap_model_to_roundpipe

WIDTH, HEADS, VOCABULARY, ROWS, LENGTH = 64, 4, 199, 4, 24


class Decoder(nn.Module):
    """Causal attention and a gated MLP, each behind a norm. [rows, length, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixed, self.merged = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        parts = self.mixed(self.first_norm(hidden)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.merged(attended.transpose(1, 2).reshape(hidden.shape))
        normed = self.second_norm(hidden)
        result: Tensor = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


def _chain(decoders: int) -> nn.Module:
    inner = [Decoder() for _ in range(decoders)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *inner, nn.Linear(WIDTH, VOCABULARY))


def _llama(decoders: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=decoders,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


_MAKERS: dict[str, Callable[[int], nn.Module]] = {"chain": _chain, "llama": _llama}


def model_names() -> list[str]:
    """The models that can be made here."""
    return ["chain", "llama"] if importlib.util.find_spec("transformers") else ["chain"]


def make(name: str, layers: int, dtype: torch.dtype, seed: int) -> nn.Module:
    """A model of at least three layers: an embedding, decoders and a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MAKERS[name](layers - 2).to(dtype)


def wrapped(model: nn.Module) -> RoundPipe:
    """The model in the pipeline, with fp32 values for its optimizer."""
    # A wrong bit may make a loss that is not finite: to be compared, not raised.
    options: dict[str, Any] = {"optim_dtype": torch.float32, "name": "selftest", "check_loss": False}
    pipe = (
        RoundPipe(model, **options) if isinstance(model, nn.Sequential) else wrap_model_to_roundpipe(model, **options)
    )
    assert isinstance(pipe, RoundPipe)
    return pipe


def batch_of_tokens(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both int64 [rows, length]."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """The mean over all tokens, in fp32. `outputs`: logits, or what has them as `logits`."""
    logits: Tensor = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
