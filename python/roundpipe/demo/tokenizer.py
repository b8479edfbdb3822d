"""A byte-level BPE trained on the training files, and the encoding of files as one row of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from roundpipe.demo.corpus import SourceFile

if TYPE_CHECKING:
    from torch import Tensor

# Separates files, so that one file's end does not predict the next one's beginning.
END_OF_FILE = "<|end|>"

VOCABULARY_SIZE = 2048

# Bytes are merged within these units: a line break with its following indentation, a word with its preceding blank, one
# digit, underscores, blanks, a run of one punctuation character. This preserves the structure of source code.
_UNIT = r"\n\s*| ?[^\W\d_]+|\d|_+| +|([^\w\s])\1*"


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Learns at most `vocabulary_size` tokens: END_OF_FILE, the 256 bytes, then merges.

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


def encode_files(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> Tensor:
    """Concatenates all files, with END_OF_FILE after each: int64 [tokens]."""
    import torch

    end: int = tokenizer.encode(END_OF_FILE).ids[0]
    tokens: list[int] = []
    for encoding in tokenizer.encode_batch([file.text for file in files]):
        tokens.extend(encoding.ids)
        tokens.append(end)
    return torch.tensor(tokens, dtype=torch.int64)
