"""What tests of language models share: a tiny Llama with a byte-level tokenizer, and conversations to learn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from roundpipe.data.samples import IGNORED

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A token a byte, and those of the chat template."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    names = {"pad_token": "<pad>", "eos_token": "<eos>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, **names)


def tiny_llama(vocabulary: int = 260, dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    """The same weights each time."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        **{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 256, **options}, vocab_size=vocabulary
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype)


def model_folder(folder: Path, **options: Any) -> Path:
    """A folder as `save_pretrained` writes it, with the tokenizer."""
    tiny_llama(**options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def chat_file(path: Path, conversations: int = 60, capitals: bool = False) -> Path:
    """Questions whose answers follow a rule: the letter asked for, some times, or its capital."""
    with path.open("w") as file:
        for index in range(conversations):
            letter, times = "abcdefgh"[index % 8], 3 + index % 7
            question = {"role": "user", "content": f"{letter} {times}"}
            content = (letter.upper() if capitals else letter) * times
            answer = {"role": "assistant", "content": content}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a user and an assistant, who take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return ([] if system is None else [{"role": "system", "content": system}]) + messages


def learnt(sample: Mapping[str, list[int]], using: PreTrainedTokenizerFast) -> list[str]:
    """The stretches of a sample's text whose tokens have labels."""
    runs: list[list[int]] = [[]]
    for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
        if label == IGNORED:
            runs.append([])
        else:
            assert label == token
            runs[-1].append(token)
    return [using.decode(run) for run in runs if run]
