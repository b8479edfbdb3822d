"""Reads conversations from a file and makes samples from which only the assistant's words are learned, in memory.

Records are those of `roundpipe.data.records`: `{"messages": [{"role": "user", "content": "..."}, ...]}`,
`{"prompt": "...", "completion": "..."}`, which counts as a question and its answer, and its other conversations.

`conversations.encoder` says how a conversation becomes tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.conversations.encoder import ChatEncoder, ChatSample
from roundpipe.data.records.formats import NO_ANSWER, format_of, item_of
from roundpipe.data.records.reading import Record, kind_of, records_of
from roundpipe.data.samples import IGNORED
from roundpipe.data.tokenizer import load_tokenizer as load_tokenizer
from roundpipe.data.tokenizer import padding_token_id as padding_token_id
from roundpipe.data.tokens.texts import json_lines
from roundpipe.data.unusable import UnusableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatData:
    """The samples of a chat file.

    Attributes:
        train: samples with `input_ids` and `labels`.
        held_out: held-out samples.
        without_answer: file and line of each conversation in which the assistant says nothing. They are left out.
    """

    train: list[ChatSample]
    held_out: list[ChatSample]
    without_answer: list[str]


def load_chat(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, held_out: float = 0.0, seed: int = 0
) -> ChatData:
    """Reads and tokenizes a chat file.

    Args:
        path: the file.
        tokenizer: with or without a chat template.
        held_out: the fraction of the conversations to hold out; at least one conversation if above 0. The same file,
            fraction and seed hold out the same conversations.
        seed: selects the held-out conversations.

    Raises:
        ValueError: the fraction leaves nothing to train on, or as in `read_chat` and `encode_chat`.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"[chat] held_out is {held_out}, expected a fraction from 0 to below 1")
    found: list[list[ChatSample]] = []
    without_answer = []
    for conversation in _read(path):
        samples = [] if isinstance(conversation, str) else encode_chat(conversation, tokenizer)
        if any(label != IGNORED for sample in samples for label in sample["labels"]):
            found.append(samples)
        else:
            without_answer.append(conversation if isinstance(conversation, str) else conversation.where)
    kept_back = max(1, round(len(found) * held_out)) if held_out else 0
    if kept_back >= len(found):
        raise ValueError(
            f"[chat] {path} has {len(found)} conversations with an answer, of which {kept_back} would be held out; "
            "expected at least one more to train on"
        )
    chosen = set(random.Random(seed).sample(range(len(found)), kept_back))
    return ChatData(
        train=[sample for index, samples in enumerate(found) if index not in chosen for sample in samples],
        held_out=[sample for index in sorted(chosen) for sample in found[index]],
        without_answer=without_answer,
    )


def read_chat(path: str | Path) -> list[Conversation]:
    """Reads and checks the conversations of a file, but those in which the assistant says nothing.

    Raises:
        ValueError: the file does not exist, cannot be read or has no records, or a record (named by its line) is
            malformed or no conversation.
    """
    return [found for found in _read(path) if isinstance(found, Conversation)]


def encode_chat(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[ChatSample]:
    """Tokenizes a conversation by `ChatEncoder`. Labels are -100 except for the assistant's text.

    Raises:
        ValueError: as the encoder, with the conversation's place.
    """
    (encoded,) = ChatEncoder(tokenizer).encode([conversation])
    if isinstance(encoded, UnusableError):
        raise ValueError(f"[chat] {conversation.where}: {encoded}") from encoded
    return encoded.samples


def _read(path: str | Path) -> Iterator[Conversation | str]:
    """Each conversation, or the place of one without an answer."""
    count = 0
    for record in _records(Path(path)):
        count += 1
        try:
            form = format_of(record.value, record.where)
            if form is None or form in ("text", "tokens", "preference"):
                raise UnusableError("broken", "no conversation", _no_conversation(record.value))
            conversation = item_of(record, form)
            assert isinstance(conversation, Conversation)
            yield conversation
        except UnusableError as error:
            if error.reason != NO_ANSWER:
                raise ValueError(f"[chat] {record.where} {error}") from None
            yield record.where
    if not count:
        raise ValueError(f"[chat] {path} is empty, expected a conversation a line")


def _no_conversation(value: object) -> str:
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}, expected an object with messages"
    return f"has the keys {sorted(value)}, expected messages, or prompt and completion"


def _records(path: Path) -> Iterator[Record]:
    def refuse(reason: str, where: str) -> NoReturn:
        raise ValueError(f"[chat] {where}: {reason}; expected a JSONL file of conversations")

    if kind_of(path) != "text":
        yield from records_of(path, lines=False, note=refuse)
        return
    try:
        with open(path, "rb") as file:
            yield from (Record(value, where) for where, value in json_lines(file, str(path), refuse))
    except OSError as error:
        raise ValueError(f"[data] cannot read {path}: {error.strerror}") from None
