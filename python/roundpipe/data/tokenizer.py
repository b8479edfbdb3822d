"""The tokenizer of a model, and the token that it pads with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roundpipe.files import first_lines, refuse_missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer beside a model's weights, or the tokenizer of a model on the Hub.

    Raises:
        ValueError: the folder does not exist, or has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    refuse_missing_folder(name_or_path, "load_tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, KeyError, ValueError, ImportError) as error:
        raise ValueError(
            f"[load_tokenizer] {name_or_path} has no tokenizer that can be loaded, expected its files beside the "
            f"model's, as tokenizer.save_pretrained writes them; transformers says: {first_lines(error)}"
        ) from error
    return tokenizer


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the padding token, or else the end-of-text token, which is harmless because padding has no labels.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise ValueError(
        f"[padding_token_id] {type(tokenizer).__name__} has no padding token and no end-of-text token, expected one "
        "of them; set tokenizer.pad_token to a token of its vocabulary"
    )
