"""Makes samples from conversations, from which only the assistant's words are learned.

If the tokenizer has a chat template, it is used. Otherwise each message becomes one line: its role, a colon, a space
and its content. A line of the assistant ends with the end-of-text token instead of a line break:

    <bos>user: What is 2 + 2?
    assistant: 4<eos>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.conversations.template import (
    ChatTemplate,
    RenderedChat,
    called,
    shared_length,
    thought_of,
    with_thought,
    words_of,
)
from roundpipe.data.conversations.tokens import ChatSample as ChatSample
from roundpipe.data.conversations.tokens import Draft, Rendered, tokenized
from roundpipe.data.pictures.content import marks_in, split_at_marks
from roundpipe.data.samples import IGNORED
from roundpipe.data.unusable import UnusableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roundpipe.data.pictures.processor import PictureProcessor

_PLAIN_KEYS = frozenset({"role", "content", "weight", "name"})

NO_TEMPLATE = "the tokenizer has no chat template: each message is a line with its role, as `user: What is 2 + 2?`"
SPLIT = "the chat template leaves thoughts or calls out of earlier answers: each such answer became a sample of its own"
SHORTER = "the chat template writes earlier answers without what it adds to the last one: they are learnt so"
LEFT_OUT = "the chat template leaves words of the assistant out: they are not learnt"
NO_THOUGHTS = "the chat template leaves thoughts of the assistant out: they are not learnt"
NO_CALLS = "the chat template leaves calls of tools out: they are not learnt"
NO_TOOLS = "the chat template leaves the tools out: the model does not see them"
UNSEEN = "the chat template leaves words of others than the assistant out: the model does not see them"
OPENED = (
    "the chat template's prompt for an answer begins otherwise than these answers, as with a thought: they are learnt "
    "without it"
)
GIVEN = (
    "the chat template leaves out thoughts that its own prompt for an answer opens: they are learnt as they are given"
)
CLOSED = "the chat template ends no answer: the token that begins the next question is learnt as its end"
NO_END = "the chat template ends no answer with a token: generation will not stop there"


@dataclass
class EncodedChat:
    """What a conversation became.

    Attributes:
        samples: with `input_ids` and `labels`; several if the chat template leaves out of an answer, once more messages
            follow, what it writes of the last one.
        notes: what the template did to the conversation, each a text that is the same for all conversations.
        rendered: what each sample was made of, if the chat template wrote it as text.
    """

    samples: list[ChatSample]
    notes: list[str] = field(default_factory=list)
    rendered: list[Rendered] = field(default_factory=list)


class ChatEncoder:
    """Tokenizes conversations. Labels are -100 except for the assistant's text, including its end-of-turn token.

    If the template marks the assistant's text (`{% generation %}`), these marks are used, as transformers does. With
    any other template, the text before a message and the text up to its end are rendered and compared with the whole.

    Args:
        tokenizer: with or without a chat template.
        everything: every token has a label, not only the assistant's.
        pictures: encodes conversations with pictures; None: the model takes none.

    Raises:
        ValueError: the tokenizer lacks a required feature.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        everything: bool = False,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer, self._everything, self._pictures = tokenizer, everything, pictures
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if not has_template and not isinstance(tokenizer.eos_token_id, int):
            raise ValueError(
                f"[chat] {type(tokenizer).__name__} has neither a chat template nor an end-of-text token, expected one "
                "of them, or answers would never end; set tokenizer.eos_token"
            )
        if has_template and not tokenizer.is_fast:
            raise ValueError(
                f"[chat] {type(tokenizer).__name__} does not say which characters a token stands for, expected a fast "
                "tokenizer for a chat template; load it with AutoTokenizer and a tokenizer.json"
            )
        self._template = ChatTemplate(tokenizer) if has_template else None

    def encode(self, conversations: Sequence[Conversation]) -> list[EncodedChat | UnusableError]:
        """What each of the conversations became, or what is wrong with it: the template fails, or renders a
        conversation's beginning in a way that hides the assistant's words."""
        found: list[EncodedChat | UnusableError] = []
        drafted: list[tuple[EncodedChat, list[Draft]]] = []
        for conversation in conversations:
            try:
                if conversation.pictures and (self._pictures is None or self._template is None):
                    raise UnusableError("broken", "pictures, which the model does not take", "expected text alone")
                if self._template is None:
                    found.append(EncodedChat([self._plainly(conversation)], [NO_TEMPLATE]))
                elif self._template.is_marked and not (self._everything or conversation.pictures):
                    found.append(self._by_marks(self._template, conversation))
                else:
                    encoded = EncodedChat([])
                    drafted.append((encoded, self._drafts(self._template, conversation, encoded.notes)))
                    found.append(encoded)
            except UnusableError as error:
                found.append(error)
        plain = [draft for _, drafts in drafted for draft in drafts if not draft.pictures]
        made = {id(draft): sample for draft, sample in zip(plain, tokenized(self._tokenizer, plain), strict=True)}
        for encoded, drafts in drafted:
            try:
                for draft in drafts:
                    if self._pictures is not None and not draft.pictures:
                        self._pictures.refuse_tokens(draft.text)
                    sample, size = self._with_pictures(draft) if draft.pictures else (made[id(draft)], 0)
                    encoded.samples.append(sample)
                    encoded.rendered.append(Rendered(draft.text, draft.pictures, size))
                    _note(encoded.notes, *draft.notes)
            except UnusableError as error:
                place = next(number for number, each in enumerate(found) if each is encoded)
                found[place] = error
        return found

    def _with_pictures(self, draft: Draft) -> tuple[ChatSample, int]:
        assert self._pictures is not None
        tokens, learnt, size = self._pictures.encode(draft.text, draft.spans, draft.pictures)
        return {"input_ids": tokens, "labels": _labels(tokens, learnt)}, size

    def _drafts(self, template: ChatTemplate, conversation: Conversation, notes: list[str]) -> list[Draft]:
        chat = RenderedChat(template, conversation)
        pictures = conversation.pictures
        whole = Draft(chat.whole, [], pictures=pictures)
        _note(notes, *_unseen(conversation, whole.text))
        if self._everything:
            text = whole.text + _closing(template, chat.messages[-1])
            return [Draft(text, [(0, len(text))], pictures=pictures)]
        alone = []
        for index, message in enumerate(chat.messages):
            if not conversation.learns(index):
                continue
            is_last = index + 1 == len(chat.messages)
            with_it = whole.text if is_last else chat.text(index + 1)
            before = chat.text(index, ask=True) if index else ""
            begin = _begin(template, chat, index, before, with_it, notes)
            thinking = _with_its_thought(template, message, before, with_it[begin:])
            if thinking is not None:
                with_it, begin = thinking
                whole.text = with_it if is_last else whole.text
                _note(notes, GIVEN)
            _note(notes, *_unlearnt(template, index, message, with_it[begin:]))
            end = _end(template, whole.text, with_it, begin, message, notes)
            if end is None:
                ended = with_it + _closing(template, message)
                seen = sum(marks_in(str(each.get("content"))) for each in chat.messages[: index + 1])
                alone.append(Draft(ended, [(begin, len(ended))], pictures=pictures[:seen]))
                _note(notes, SPLIT)
            else:
                if is_last:
                    whole.text += _closing(template, message)
                    end = len(whole.text)
                elif not template.ends:
                    end = template.own_at(whole.text, end)
                whole.spans.append((begin, end))
            if not template.ends:
                _note(notes, CLOSED if template.closing else NO_END)
        return [*alone, whole] if whole.spans or not alone else alone

    def _by_marks(self, template: ChatTemplate, conversation: Conversation) -> EncodedChat:
        chat = RenderedChat(template, conversation)
        tokens, marks = chat.marked()
        spoken = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        changes = [0, *(place for place, (one, other) in enumerate(pairwise(marks), start=1) if one != other)]
        stretches = [
            (begin, end) for begin, end in pairwise([*changes, len(marks)]) if marks[begin : begin + 1] == [True]
        ]
        learnt = list(marks)
        if not all(conversation.learns(index) for index in spoken):
            if len(stretches) != len(spoken):
                raise UnusableError(
                    "broken",
                    "answers that are not to be learnt, by a template that does not mark each by itself",
                    f"some answers are not to be learnt, and the chat template marks {len(stretches)} stretches for "
                    f"{len(spoken)} answers; expected one for each, or a template without {{% generation %}}",
                )
            for index, (begin, end) in zip(spoken, stretches, strict=True):
                if not conversation.learns(index):
                    learnt[begin:end] = [False] * (end - begin)
        notes = _unseen(conversation, chat.whole)
        for index in spoken:
            if conversation.learns(index):
                _note(notes, *_unlearnt(template, index, chat.messages[index], chat.whole))
        endings = [str(self._tokenizer.decode(tokens[max(begin, end - 2) : end])) for begin, end in stretches]
        if not all(template.has_own(ending) for ending in endings):
            _note(notes, NO_END)
        rendered: list[Rendered] = []
        if self._pictures is not None:  # others of the batch may have some
            self._pictures.refuse_tokens(chat.whole)
            rendered = [Rendered(chat.whole, ())]
        return EncodedChat([{"input_ids": tokens, "labels": _labels(tokens, learnt)}], notes, rendered)

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


def _closing(template: ChatTemplate, message: dict[str, Any]) -> str:
    """What is written behind the last message, if it is an answer, to end it."""
    return template.closing if message["role"] == "assistant" and not message.get("tool_calls") else ""


def _begin(template: ChatTemplate, chat: RenderedChat, index: int, before: str, with_it: str, notes: list[str]) -> int:
    """Where an answer begins in the text up to its end; `before`: what is asked of it, "" for the first message."""
    if index == 0:
        begin = template.first_begin(with_it)
    else:
        if with_it.startswith(before):
            # Behind what a tool has answered, the prompt may be empty.
            return len(before) + (len(template.prompt) if with_it.startswith(template.prompt, len(before)) else 0)
        begin = template.begin(before, with_it, chat.text(index))
        if begin is not None and not (template.opens_thought and thought_of(chat.messages[index])):
            _note(notes, OPENED)
    if begin is None:
        raise UnusableError(
            "broken",
            "the chat template hides where an answer begins",
            f"message {index}: the chat template renders the conversation up to here differently from the whole, so "
            "the assistant's words cannot be found; expected a template that only appends; mark them in the template "
            "with {% generation %}, or end the conversation with this answer",
        )
    return begin


def _with_its_thought(
    template: ChatTemplate, message: dict[str, Any], before: str, stretch: str
) -> tuple[str, int] | None:
    """The text up to the end of an answer with its thought, and where it begins, for a template that opens a thought
    and does not write it; None for others, and for the first message, which nothing is before."""
    thought, words = thought_of(message), words_of(message)
    if not before or not template.opens_thought or not thought or thought in stretch or words not in stretch:
        return None
    ending = stretch[stretch.rfind(words) + len(words) :]
    return before + with_thought(message) + ending, len(before)


def _end(
    template: ChatTemplate, whole: str, with_it: str, begin: int, message: dict[str, Any], notes: list[str]
) -> int | None:
    """Where an answer ends in the whole; None if the whole lacks words of it, or its end.

    The whole may write an earlier answer without what the template adds to the last one, for example an empty thought
    or the end of the text.
    """
    if whole.startswith(with_it):
        return len(with_it)
    answer = (message.get("content") or "").strip()
    more = [value for key, value in message.items() if value and key not in _PLAIN_KEYS]
    own = all(isinstance(value, str) and value.strip() not in with_it[begin:] for value in more)
    place = with_it.rfind(answer, begin)
    if not answer or not own or place < 0 or not whole.startswith(with_it[:begin] + answer):
        return None
    ending, end = with_it[place + len(answer) :], begin + len(answer)
    shared = ending[: shared_length(ending, whole[end : end + len(ending)])]
    if shared != ending:
        shared = template.whole_tokens(shared)
        if not shared:
            return None
    _note(notes, SHORTER)
    return end + len(shared)


def _unlearnt(template: ChatTemplate, index: int, message: dict[str, Any], stretch: str) -> list[str]:
    """What of an answer a stretch of text lacks. Raises UnusableError if that is all of it."""
    notes = []
    words, names = words_of(message), called(message)
    if any(name not in stretch for name in names):
        notes.append(NO_CALLS)
    if words not in stretch:
        notes.append(LEFT_OUT)
    if thought_of(message) not in stretch:
        notes.append(NO_THOUGHTS)
    is_written = (words and words in stretch) or any(name in stretch for name in names)
    if (words or names) and not is_written and not template.without_own(stretch).strip():
        raise UnusableError(
            "broken",
            "the chat template writes nothing of an answer",
            f"the chat template writes nothing of message {index}, expected its words or calls; use a template that "
            "knows them",
        )
    if NO_CALLS in notes and not words:
        raise UnusableError("broken", NO_CALLS, f"message {index} has nothing else, expected a template that writes it")
    return notes


def _unseen(conversation: Conversation, text: str) -> list[str]:
    """What of the conversation, but for answers, a text lacks."""
    notes = []
    for tool in conversation.tools or []:
        described = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(described, dict) and str(described.get("name", "")) not in text:
            notes = [NO_TOOLS]
    for message in conversation.messages:
        words = message.get("content")
        if message["role"] == "assistant" or not isinstance(words, str):
            continue
        for part in split_at_marks(words):
            quoted = (json.dumps(part.strip(), ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            if part.strip() not in text and not any(form in text for form in quoted):
                _note(notes, UNSEEN)
    return notes


def _note(notes: list[str], *more: str) -> None:
    notes += [note for note in dict.fromkeys(more) if note not in notes]


def _labels(tokens: Sequence[int], learnt: list[bool]) -> list[int]:
    return [token if flag else IGNORED for token, flag in zip(tokens, learnt, strict=True)]
