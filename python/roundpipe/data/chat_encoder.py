"""Makes samples from conversations, from which only the assistant's words are learned.

If the tokenizer has a chat template, it is used. Otherwise each message becomes one line: its role, a colon, a space
and its content. A line of the assistant ends with the end-of-text token instead of a line break:

    <bos>user: What is 2 + 2?
    assistant: 4<eos>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.data.conversation import Conversation, UnusableError
from roundpipe.data.samples import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatSample = dict[str, list[int]]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLAIN_KEYS = frozenset({"role", "content", "weight", "name"})

SPLIT = "the chat template leaves thoughts or calls out of earlier answers: each such answer became a sample of its own"
SHORTER = "the chat template writes earlier answers without what it adds to the last one: they are learnt so"
LEFT_OUT = "the chat template leaves words of the assistant out: they are not learnt"


@dataclass
class EncodedChat:
    """What a conversation became.

    Attributes:
        samples: with `input_ids` and `labels`; several if the chat template leaves out of an answer, once more messages
            follow, what it writes of the last one.
        notes: what the template did to the conversation, each a text that is the same for all conversations.
    """

    samples: list[ChatSample]
    notes: list[str] = field(default_factory=list)


@dataclass
class _Draft:
    """A text, and the stretches of it that are learnt."""

    text: str
    spans: list[tuple[int, int]]


class ChatEncoder:
    """Tokenizes conversations. Labels are -100 except for the assistant's text, including its end-of-turn token.

    If the template marks the assistant's text (`{% generation %}`), these marks are used, as transformers does. With
    any other template, the text before a message and the text up to its end are rendered and compared with the whole.

    Args:
        tokenizer: with or without a chat template.
        everything: every token has a label, not only the assistant's.

    Raises:
        ValueError: the tokenizer lacks a required feature.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool = False) -> None:
        self._tokenizer, self._everything = tokenizer, everything
        template: Any = getattr(tokenizer, "chat_template", None)
        self._plain = not template
        self._marked = not everything and isinstance(template, str) and bool(_MARK.search(template))
        if self._plain and not isinstance(tokenizer.eos_token_id, int):
            raise ValueError(
                f"[chat] {type(tokenizer).__name__} has neither a chat template nor an end-of-text token, expected one "
                "of them, or answers would never end; set tokenizer.eos_token"
            )
        if not self._plain and not tokenizer.is_fast:
            raise ValueError(
                f"[chat] {type(tokenizer).__name__} does not say which characters a token stands for, expected a fast "
                "tokenizer for a chat template; load it with AutoTokenizer and a tokenizer.json"
            )

    def encode(self, conversations: Sequence[Conversation]) -> list[EncodedChat | UnusableError]:
        """What each of the conversations became, or what is wrong with it: the template fails, or renders a
        conversation's beginning in a way that hides the assistant's words."""
        found: list[EncodedChat | UnusableError] = []
        drafts: list[tuple[EncodedChat, list[_Draft]]] = []
        for conversation in conversations:
            try:
                if self._plain:
                    found.append(EncodedChat([self._plainly(conversation)]))
                elif self._marked:
                    found.append(self._by_marks(conversation))
                else:
                    encoded = EncodedChat([])
                    drafts.append((encoded, self._drafts(conversation, encoded.notes)))
                    found.append(encoded)
            except UnusableError as error:
                found.append(error)
        texts = [draft.text for _, of_one in drafts for draft in of_one]
        samples = iter(self._tokenized(texts, [draft.spans for _, of_one in drafts for draft in of_one]))
        for encoded, of_one in drafts:
            encoded.samples = [next(samples) for _ in of_one]
        return found

    def _tokenized(self, texts: list[str], spans: list[list[tuple[int, int]]]) -> list[ChatSample]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,  # the template writes them
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        samples = []
        for tokens, offsets, learnt in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
            starts = np.array([start for start, _ in offsets], dtype=np.int64)
            flags = np.zeros(len(starts), dtype=bool)
            for first, last in learnt:
                flags |= (first <= starts) & (starts < last)
            samples.append({"input_ids": list(tokens), "labels": np.where(flags, tokens, IGNORED).tolist()})
        return samples

    def _render(self, conversation: Conversation, count: int, ask: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                conversation.messages[:count],
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=ask,
                **conversation.template_options,
            )
        except Exception as error:  # whatever a template raises
            raise _template_failed(error) from error
        return str(text)

    def _drafts(self, conversation: Conversation, notes: list[str]) -> list[_Draft]:
        messages = conversation.messages
        whole = _Draft(self._render(conversation, len(messages), False), [])
        if self._everything:
            return [_Draft(whole.text, [(0, len(whole.text))])]
        alone = []
        for index, message in enumerate(messages):
            if not conversation.learns(index):
                continue
            before = self._render(conversation, index, True)
            last = index + 1 == len(messages)
            with_it = whole.text if last else self._render(conversation, index + 1, False)
            if not with_it.startswith(before):
                raise _hidden(index)
            if whole.text.startswith(with_it):
                whole.spans.append((len(before), len(with_it)))
            elif (end := _end_of_words(whole.text, before, with_it, message)) is not None:
                whole.spans.append((len(before), end))
                _note(notes, SHORTER)
            else:
                alone.append(_Draft(with_it, [(len(before), len(with_it))]))
                _note(notes, SPLIT)
        return [*alone, whole] if whole.spans or not alone else alone

    def _by_marks(self, conversation: Conversation) -> EncodedChat:
        learnt = [index for index in range(len(conversation.messages)) if conversation.learns(index)]
        spoken = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if learnt != spoken:
            raise UnusableError(
                "broken",
                "answers that are not to be learnt, by a template that marks all of them",
                "some answers are not to be learnt, but the chat template marks all of them; expected all, or a "
                "template without {% generation %}",
            )
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **conversation.template_options,
            )
        except Exception as error:  # whatever a template raises
            raise _template_failed(error) from error
        tokens = list(encoded["input_ids"])
        text = self._render(conversation, len(conversation.messages), False)
        words = [conversation.messages[index].get("content") or "" for index in spoken]
        notes = [] if all(each.strip() in text for each in words) else [LEFT_OUT]
        labels = _labels(tokens, [bool(mark) for mark in encoded["assistant_masks"]])
        return EncodedChat([{"input_ids": tokens, "labels": labels}], notes)

    def _plainly(self, conversation: Conversation) -> ChatSample:
        if conversation.tools or any(message.get("tool_calls") for message in conversation.messages):
            raise UnusableError(
                "broken",
                "tools without a chat template",
                "has tools or calls of them, and the tokenizer has no chat template that writes them; expected texts",
            )
        start = self._tokenizer.bos_token_id
        tokens = [start] if isinstance(start, int) else []
        flags = [False] * len(tokens)
        for index, message in enumerate(conversation.messages):
            speaks = message["role"] == "assistant"
            ending = [self._tokenizer.eos_token_id] if speaks else self._numbers("\n")
            words = [*self._numbers(message["content"]), *ending]
            role = self._numbers(f"{message['role']}: ")
            tokens += role + words
            flags += [False] * len(role) + [conversation.learns(index)] * len(words)
        return {"input_ids": tokens, "labels": list(tokens) if self._everything else _labels(tokens, flags)}

    def _numbers(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _end_of_words(whole: str, before: str, with_it: str, message: dict[str, Any]) -> int | None:
    """Where an answer ends in the whole that is written there without what the template adds to the last one, for
    example an empty thought; None if words of its own are missing."""
    answer = (message.get("content") or "").strip()
    own = all(not value for key, value in message.items() if key not in _PLAIN_KEYS)
    if not answer or not own or answer not in with_it[len(before) :]:
        return None
    ending = with_it[with_it.rfind(answer) + len(answer) :]
    if not whole.startswith(before) or not whole.startswith(answer + ending, len(before)):
        return None
    return len(before) + len(answer + ending)


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _labels(tokens: Sequence[int], learnt: list[bool]) -> list[int]:
    return [token if flag else IGNORED for token, flag in zip(tokens, learnt, strict=True)]


def _hidden(index: int) -> UnusableError:
    return UnusableError(
        "broken",
        "the chat template hides where an answer begins",
        f"message {index}: the chat template renders the conversation up to here differently from the whole, so the "
        "assistant's words cannot be found; expected a template that only appends; mark them in the template with "
        "{% generation %}, or end the conversation with this answer",
    )


def _template_failed(error: Exception) -> UnusableError:
    return UnusableError(
        "broken",
        f"the chat template failed: {str(error)[:120]}",
        f"the tokenizer's chat template failed: {error}; expected a template that takes these roles",
    )
