"""The untrained model of the demo, as a user would have one: a small Llama and its tokenizer, in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from roundpipe.files import new_folder
from roundpipe.huggingface.quiet import without_progress_bars
from roundpipe.plan.measure import matmul_gflops

# Ends each file, so that one file's end does not predict the next one's beginning.
END_OF_FILE = "<|end|>"

VOCABULARY_SIZE = 2048

# Bytes are merged within these units: a line break with its following indentation, a word with its preceding blank, one
# digit, underscores, blanks, a run of one punctuation character. This preserves the structure of source code.
_UNIT = r"\n\s*| ?[^\W\d_]+|\d|_+| +|([^\w\s])\1*"

# bfloat16 costs accuracy, so it must be clearly faster; the margin also keeps the choice the same between runs.
_LEAST_SPEEDUP = 1.5


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Learns at most `vocabulary_size` tokens of a byte-level BPE: END_OF_FILE, the 256 bytes, then merges.

    Every text survives a round trip.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UNIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fast_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The type of weights that the device multiplies fast, and the measurement of a quarter of a second behind it."""
    full, half = matmul_gflops(device, torch.float32), matmul_gflops(device, torch.bfloat16)
    measured = f"matmul GFLOP/s on {device.type}: float32 {full:,.0f}, bfloat16 {half:,.0f}"
    return torch.bfloat16 if half >= _LEAST_SPEEDUP * full else torch.float32, measured


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
        # In so short a run, layers learn faster that start close to the identity, and a head whose updates move the
        # logits more than the layers'.
        llama.model.norm.weight.mul_(5)
        llama.lm_head.weight.div_(5)
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    # `llama.to(dtype)` would also cast the rotary frequencies, a buffer, to 8 bits of mantissa.
    for parameter in llama.parameters():
        parameter.data = parameter.data.to(dtype)
    return llama


def save_model(folder: Path, llama: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes a folder that transformers loads, whole or not at all."""
    fast: Any = PreTrainedTokenizerFast
    with new_folder(folder, "demo") as written, without_progress_bars():
        llama.save_pretrained(written)
        fast(tokenizer_object=tokenizer, eos_token=END_OF_FILE).save_pretrained(written)
