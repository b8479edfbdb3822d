"""Texts of conversations become tokens, of which those of given stretches are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.data.pictures.content import Medium
from roundpipe.data.samples import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatSample = dict[str, list[int]]

APART = (
    "a token would have the end of a prompt and the beginning of its answer: they are tokenized apart, as generation "
    "meets them"
)
FIRST_LETTERS = (
    "a token has the end of a prompt and the beginning of its answer, whose first letters are not learnt, since the "
    "tokenizer makes other text of the parts"
)


@dataclass
class Draft:
    """A text, the stretches of it that are learnt, in order, a list for notes, and its pictures, videos and sounds."""

    text: str
    spans: list[tuple[int, int]]
    notes: list[str] = field(default_factory=list)
    pictures: tuple[Medium, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """What a sample was made of: a text as the chat template writes it, and its pictures, videos and sounds, of which
    a processor makes `size` bytes for the model."""

    text: str
    pictures: tuple[Medium, ...]
    size: int = 0


def tokenized(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[Draft]) -> list[ChatSample]:
    """The tokens of the texts, with labels for the stretches. The tokenizer sees all texts at once."""
    if not drafts:
        return []
    encoded = _encoded(tokenizer, [draft.text for draft in drafts], return_offsets_mapping=True)
    samples = []
    for draft, tokens, offsets in zip(drafts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts = np.array([start for start, _ in offsets], dtype=np.int64)
        ends = np.array([end for _, end in offsets], dtype=np.int64)
        bounds = [place for span in draft.spans for place in span]
        if any(bool(((starts < place) & (place < ends)).any()) for place in bounds):
            apart = _apart(tokenizer, draft, list(tokens))
            draft.notes.append(FIRST_LETTERS if apart is None else APART)
            if apart is not None:
                samples.append(apart)
                continue
        learnt = np.zeros(len(starts), dtype=bool)
        for first, last in draft.spans:
            learnt |= (first <= starts) & (starts < last)
        samples.append({"input_ids": list(tokens), "labels": np.where(learnt, tokens, IGNORED).tolist()})
    return samples


def _apart(tokenizer: PreTrainedTokenizerBase, draft: Draft, whole: list[int]) -> ChatSample | None:
    """The sample of parts that are tokenized one by one; None if these are not the same text, as where a tokenizer puts
    a space before each."""
    cuts = sorted({0, len(draft.text), *(place for span in draft.spans for place in span)})
    pieces = [(begin, draft.text[begin:end]) for begin, end in pairwise(cuts)]
    tokens: list[int] = []
    labels: list[int] = []
    begins = {begin for begin, _ in draft.spans}
    for (begin, _), part in zip(pieces, _encoded(tokenizer, [text for _, text in pieces])["input_ids"], strict=True):
        tokens += part
        labels += part if begin in begins else [IGNORED] * len(part)
    is_same = _text(tokenizer, tokens) == _text(tokenizer, whole)
    return {"input_ids": tokens, "labels": labels} if is_same else None


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], **more: Any) -> Any:
    # The template writes special tokens.
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **more)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
