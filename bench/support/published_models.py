"""The models of the published results, as their configurations on the Hugging Face Hub have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960}


@dataclass(frozen=True)
class PublishedModel:
    """One of the five.

    Attributes:
        source: where its config.json is: https://huggingface.co/SOURCE/blob/main/config.json.
        lora: only adapters were trained.
        longest_row: tokens that the published system trains on 24 GB cards (arXiv:2604.27085).
    """

    source: str
    kind: str
    sizes: dict[str, Any]
    preset: str
    lora: bool
    longest_row: str

    def config(self, **changes: Any) -> PretrainedConfig:
        """Of transformers, with other sizes where `changes` has them."""
        return AutoConfig.for_model(self.kind, **self.sizes | changes)


MODELS = {
    "Qwen3-1.7B": PublishedModel(
        "Qwen/Qwen3-1.7B",
        "qwen3",
        _QWEN3
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "tie_word_embeddings": True},
        "qwen3-1.7b",
        False,
        "73K",
    ),
    "Llama-3.1-8B": PublishedModel(
        "meta-llama/Llama-3.1-8B",
        "llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"tie_word_embeddings": False},
        "llama3.1-8b",
        False,
        "49K",
    ),
    "gpt-oss-20b": PublishedModel(
        "openai/gpt-oss-20b",
        "gpt_oss",
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"tie_word_embeddings": False},
        "gpt-oss-20b",
        False,
        "39K",
    ),
    "Qwen3-32B": PublishedModel(
        "Qwen/Qwen3-32B",
        "qwen3",
        _QWEN3
        | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "tie_word_embeddings": False},
        "qwen3-32b",
        False,
        "28K",
    ),
    "Qwen3-235B-A22B": PublishedModel(
        "Qwen/Qwen3-235B-A22B",
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
        | {"tie_word_embeddings": False},
        "qwen3-235b-lora",
        True,
        "31K",
    ),
}
