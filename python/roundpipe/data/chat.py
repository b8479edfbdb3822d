"""Reads conversations from a JSONL file and makes samples from which only the assistant's words are learned.

A line is `{"messages": [{"role": "user", "content": "..."}, ...]}`, or `{"prompt": "...", "completion": "..."}`, which
counts as a question and its answer.

`chat_encoder` says how a conversation becomes tokens.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.data.chat_encoder import ChatEncoder, ChatSample
from roundpipe.data.conversation import Conversation, UnusableError, checked_messages
from roundpipe.data.samples import IGNORED
from roundpipe.files import first_lines, refuse_missing_folder

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
    for conversation in read_chat(path):
        samples = encode_chat(conversation, tokenizer)
        if any(label != IGNORED for sample in samples for label in sample["labels"]):
            found.append(samples)
        else:
            without_answer.append(conversation.where)
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
    """Reads and checks the conversations of a file. Empty lines are skipped.

    Raises:
        ValueError: the file does not exist or is empty, or (with the line's number) JSON is malformed, keys are
            missing, a content is not text, or roles are out of order.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"[chat] cannot read {path}: {error}; expected a JSONL file of conversations") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also break lines inside strings
        if line.strip():
            where = f"{path}:{number}"
            found.append(Conversation(_messages(line, where), where))
    if not found:
        raise ValueError(f"[chat] {path} is empty, expected a conversation a line")
    return found


def encode_chat(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[ChatSample]:
    """Tokenizes a conversation by `ChatEncoder`. Labels are -100 except for the assistant's text.

    Raises:
        ValueError: as the encoder, with the conversation's place.
    """
    (encoded,) = ChatEncoder(tokenizer).encode([conversation])
    if isinstance(encoded, UnusableError):
        raise ValueError(f"[chat] {conversation.where}: {encoded}") from encoded
    return encoded.samples


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
        f"[chat] {type(tokenizer).__name__} has no padding token and no end-of-text token, expected one of them; set "
        "tokenizer.pad_token to a token of its vocabulary"
    )


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"[chat] {where} is not JSON: {error}; expected one object a line") from None
    if not isinstance(entry, dict):
        raise ValueError(f"[chat] {where} is a {type(entry).__name__}, expected an object with messages")
    if "messages" in entry:
        messages = entry["messages"]
    elif "prompt" in entry and "completion" in entry:
        messages = [
            {"role": "user", "content": entry["prompt"]},
            {"role": "assistant", "content": entry["completion"]},
        ]
    else:
        raise ValueError(f"[chat] {where} has the keys {sorted(entry)}, expected messages, or prompt and completion")
    try:
        return checked_messages(messages)
    except UnusableError as error:
        raise ValueError(f"[chat] {where}: {error}") from None
