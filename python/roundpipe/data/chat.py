"""Reads conversations from a JSONL file and makes samples from which only the assistant's words are learned.

A line is `{"messages": [{"role": "user", "content": "..."}, ...]}`, or `{"prompt": "...", "completion": "..."}`, which
counts as a question and its answer.

If the tokenizer has a chat template, it is used. Otherwise each message becomes one line: its role, a colon, a space
and its content. A line of the assistant ends with the end-of-text token instead of a line break:

    <bos>user: What is 2 + 2?
    assistant: 4<eos>
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.data.samples import IGNORED
from roundpipe.files import first_lines, refuse_missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatSample = dict[str, list[int]]

# The roles that may follow a role; None stands for the beginning.
_NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Conversation:
    """One line of a chat file. `where` is its file and line, for errors."""

    messages: list[dict[str, Any]]
    where: str


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
    samples, without_answer = [], []
    for conversation in read_chat(path):
        sample = encode_chat(conversation, tokenizer)
        if all(label == IGNORED for label in sample["labels"]):
            without_answer.append(conversation.where)
        else:
            samples.append(sample)
    kept_back = max(1, round(len(samples) * held_out)) if held_out else 0
    if kept_back >= len(samples):
        raise ValueError(
            f"[chat] {path} has {len(samples)} conversations with an answer, of which {kept_back} would be held out; "
            "expected at least one more to train on"
        )
    chosen = set(random.Random(seed).sample(range(len(samples)), kept_back))
    return ChatData(
        train=[sample for index, sample in enumerate(samples) if index not in chosen],
        held_out=[samples[index] for index in sorted(chosen)],
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


def encode_chat(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> ChatSample:
    """Tokenizes a conversation. Labels are -100 except for the assistant's text, including its end-of-turn token.

    If the template marks the assistant's text (`{% generation %}`), these marks are used. With any other template, the
    text before a message and the text up to its end are rendered and compared.

    Raises:
        ValueError: the template fails, or renders a conversation's beginning differently from the whole, or the
            tokenizer lacks a required feature.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return _encode_plainly(conversation, tokenizer)
    if not tokenizer.is_fast:
        raise ValueError(
            f"[chat] {type(tokenizer).__name__} does not say which characters a token stands for, expected a fast "
            "tokenizer for a chat template; load it with AutoTokenizer and a tokenizer.json"
        )
    if isinstance(template, str) and "{% generation" in template.replace("{%-", "{%"):
        return _encode_by_marks(conversation, tokenizer)
    return _encode_by_prefixes(conversation, tokenizer)


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
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"[chat] {where} has no list of messages, expected at least one message")
    before: str | None = None
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"[chat] {where}: message {index} is {message!r}, expected an object with role and content"
            )
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise ValueError(f"[chat] {where}: the content of message {index} is a {kind}, expected text")
        role = message["role"]
        if role not in _NEXT[before]:
            behind = "at the beginning" if before is None else f"behind {before!r}"
            raise ValueError(
                f"[chat] {where}: message {index} has the role {role!r} {behind}, expected {' or '.join(_NEXT[before])}"
            )
        before = role
    return messages


def _encode_plainly(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> ChatSample:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(
            f"[chat] {type(tokenizer).__name__} has neither a chat template nor an end-of-text token, expected one of "
            "them, or answers would never end; set tokenizer.eos_token"
        )
    tokens: list[int] = []
    labels: list[int] = []

    def add(numbers: Sequence[int], learnt: bool) -> None:
        tokens.extend(numbers)
        labels.extend(numbers if learnt else [IGNORED] * len(numbers))

    def numbers_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    if isinstance(tokenizer.bos_token_id, int):
        add([tokenizer.bos_token_id], False)
    for message in conversation.messages:
        speaks = message["role"] == "assistant"
        add(numbers_of(f"{message['role']}: "), False)
        add(numbers_of(message["content"]), speaks)
        add([end] if speaks else numbers_of("\n"), speaks)
    return {"input_ids": tokens, "labels": labels}


def _encode_by_marks(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> ChatSample:
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # whatever a template raises
        raise _template_failed(conversation, error) from error
    tokens = list(encoded["input_ids"])
    return {"input_ids": tokens, "labels": _labels(tokens, [bool(mark) for mark in encoded["assistant_masks"]])}


def _encode_by_prefixes(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> ChatSample:
    messages = conversation.messages

    def render(count: int, ask: bool) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask))
        except Exception as error:  # whatever a template raises
            raise _template_failed(conversation, error) from error

    text = render(len(messages), False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, with_it = render(index, True), render(index + 1, False)
            spans.append(_span(text, before, with_it, message["content"], f"{conversation.where}: message {index}"))
    encoded: Mapping[str, Any] = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = list(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    return {
        "input_ids": tokens,
        "labels": _labels(tokens, [any(first <= start < last for first, last in spans) for start in starts]),
    }


def _span(text: str, before: str, with_it: str, content: str, where: str) -> tuple[int, int]:
    """The span of an answer in `text`, given the text before it and the text that ends with it."""
    if text.startswith(before) and with_it.startswith(before):
        if text.startswith(with_it):
            return len(before), len(with_it)
        # Some templates render the last answer differently, for example with an empty thought: compare only the text
        # after the content.
        answer = content.strip()
        ending = with_it[with_it.rfind(answer) + len(answer) :] if answer in with_it[len(before) :] else None
        if answer and ending is not None and text.startswith(answer + ending, len(before)):
            return len(before), len(before) + len(answer + ending)
    raise ValueError(
        f"[chat] {where}: the chat template renders the conversation up to here differently from the whole, so the "
        "assistant's words cannot be found; expected a template that only appends; mark them in the template with "
        "{% generation %}, or end the conversation with this answer"
    )


def _labels(tokens: list[int], learnt: list[bool]) -> list[int]:
    return [token if flag else IGNORED for token, flag in zip(tokens, learnt, strict=True)]


def _template_failed(conversation: Conversation, error: Exception) -> ValueError:
    return ValueError(
        f"[chat] {conversation.where}: the tokenizer's chat template failed: {error}; expected a template that takes "
        "these roles"
    )
