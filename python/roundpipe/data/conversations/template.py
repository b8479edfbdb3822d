"""A tokenizer's chat template: what it writes of conversations, and where its answers begin and end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.pictures.content import marks_in, parts_of
from roundpipe.data.unusable import UnusableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN, _CLOSED = "<think>", "</think>"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
_QUESTION, _ANSWER = "Which colour is it?", "It is blue."


class ChatTemplate:
    """The template of a tokenizer. It is tried on a conversation of its own first.

    Args:
        tokenizer: with a chat template.

    Attributes:
        is_marked: whether it marks the assistant's text (`{% generation %}`).
        ends: whether it writes a token of its own behind an answer, at which generation can stop.
        closing: if it writes none, the token that it begins the next question with, which then ends an answer; "" if
            there is none either.
        prompt: what it writes behind a question to have an answer begin.
        opens_thought: whether that ends in a thought that is open.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template: Any = tokenizer.chat_template
        self.is_marked = isinstance(template, str) and bool(_MARK.search(template))
        added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        names = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._own = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._in_parts = False
        self._in_parts = not self._writes_words() and self._writes_words(in_parts=True)
        self.ends, self.closing = self._ending()
        asked, question = self._tried(1, ask=True), self._tried(1)
        is_longer = asked is not None and question is not None and asked.startswith(question)
        self.prompt = asked[len(question) :] if is_longer and asked and question else ""
        self.opens_thought = self.prompt.rstrip().endswith(_OPEN)

    def has_own(self, text: str) -> bool:
        """Whether a text has a token of the template, or of the tokenizer, which no words are split into."""
        return bool(self._own.search(text))

    def own_at(self, text: str, place: int) -> int:
        """Where such a token ends that begins at this place; the place itself if none does."""
        found = self._own.match(text, place)
        return found.end() if found else place

    def whole_tokens(self, text: str) -> str:
        """The beginning of a text that ends with such a token and the white space behind it; "" without one."""
        ends = [found.end() for found in self._own.finditer(text)]
        rest = text[ends[-1] :] if ends else ""
        return text[: len(text) - len(rest.lstrip())] if ends else ""

    def without_own(self, text: str) -> str:
        """The text without such tokens."""
        return self._own.sub("", text)

    def begin(self, before: str, with_it: str, base: str) -> int | None:
        """Where an answer begins in a text whose generation prompt it does not continue, as where that prompt opens a
        thought: behind what both have. None: the answer cannot be found.

        Args:
            before: the messages before the answer, with the generation prompt.
            with_it: these messages and the answer.
            base: these messages.
        """
        shared = shared_length(before, with_it)
        if not base or not with_it.startswith(base) or shared < len(base):
            return None
        return shared

    def first_begin(self, text: str) -> int | None:
        """Where an answer begins that is a conversation's first message; None: it cannot be found."""
        place = text.find(self.prompt) if self.prompt else -1
        return None if place < 0 else place + len(self.prompt)

    def _writes_words(self, in_parts: bool = False) -> bool:
        self._in_parts = in_parts
        text = self._tried(2)
        return text is not None and _QUESTION in text and _ANSWER in text

    def _ending(self) -> tuple[bool, str]:
        short, long = self._tried(2), self._tried(3)
        if short is None or long is None or _ANSWER not in short:
            return True, ""
        if self.has_own(short[short.rfind(_ANSWER) + len(_ANSWER) :]):
            return True, ""
        following = self._own.match(long, long.find(_ANSWER) + len(_ANSWER))
        return False, following.group() if following else ""

    def _tried(self, count: int, ask: bool = False) -> str | None:
        said = [("user", _QUESTION), ("assistant", _ANSWER), ("user", _QUESTION)][:count]
        messages = [{"role": role, "content": content} for role, content in said]
        try:
            return RenderedChat(self, Conversation(messages, "")).text(count, ask)
        except UnusableError:
            return None

    def applied(self, messages: list[dict[str, Any]], conversation: Conversation, **how: Any) -> Any:
        """What the template makes of messages of a conversation. Raises what the template raises."""
        messages = [_in_parts(message, self._in_parts) for message in messages]
        return self._tokenizer.apply_chat_template(
            messages, tools=conversation.tools, **how, **conversation.template_options
        )


class RenderedChat:
    """A conversation as the template writes it.

    Arguments of calls are handed to it as an object, as transformers documents, or as a text, and an empty content
    beside calls as it is, or as none: the first of these that the template takes, and with which it writes the calls.

    Args:
        template: of the tokenizer.
        conversation: that was checked.

    Attributes:
        messages: in that form.
        whole: the text of all of them.

    Raises:
        UnusableError: the template fails.
    """

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template, self._conversation = template, conversation
        failed: UnusableError | None = None
        taken: list[tuple[list[dict[str, Any]], str]] = []
        for form in _forms(conversation.messages):
            self.messages = form
            try:
                self.whole = self.text(len(form))
            except UnusableError as error:
                failed = failed or error
                continue
            if all(name in self.whole for message in form for name in called(message)):
                return
            taken.append((form, self.whole))
        if not taken:
            assert failed is not None
            raise failed
        self.messages, self.whole = taken[0]

    def text(self, count: int, ask: bool = False) -> str:
        """The first messages; `ask`: with what has an answer begin. Raises UnusableError if the template fails."""
        return str(self._applied(count, tokenize=False, add_generation_prompt=ask))

    def marked(self) -> tuple[list[int], list[bool]]:
        """All tokens, and whether the template marks them as the assistant's."""
        found = self._applied(len(self.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]

    def _applied(self, count: int, **how: Any) -> Any:
        try:
            return self._template.applied(self.messages[:count], self._conversation, **how)
        except Exception as error:  # whatever a template raises
            raise UnusableError(
                "broken",
                f"the chat template failed: {str(error)[:120]}",
                f"the tokenizer's chat template failed: {error}; expected a template that takes these roles",
            ) from error


def shared_length(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # bisection, as texts are long
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[:middle] == other[:middle] else (least, middle - 1)
    return least


def _in_parts(message: dict[str, Any], always: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not (always or marks_in(content)):
        return message
    return {**message, "content": parts_of(content)}


def thought_of(message: Mapping[str, Any]) -> str:
    """What an answer thinks, beside its words or before them; "" without a thought."""
    beside = [message.get(name) for name in _THOUGHTS]
    before = str(message.get("content") or "").rpartition(_CLOSED)[0]
    texts = [each for each in (*beside, before.rpartition(_OPEN)[2]) if isinstance(each, str)]
    return next((text.strip() for text in texts if text.strip()), "")


def words_of(message: Mapping[str, Any]) -> str:
    """What an answer says without its thought."""
    return str(message.get("content") or "").rpartition(_CLOSED)[2].strip()


def with_thought(message: Mapping[str, Any]) -> str:
    """A thought that the prompt has opened, its end, and the answer's words."""
    before, closed, words = str(message.get("content") or "").rpartition(_CLOSED)
    if closed:
        return before.rpartition(_OPEN)[2].lstrip() + closed + words.rstrip()
    return f"{thought_of(message)}\n{_CLOSED}\n\n{words.strip()}"


def called(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    calls = [call for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    functions = [call.get("function") if isinstance(call.get("function"), Mapping) else call for call in calls]
    return [str(function.get("name", "")) for function in functions if function is not None]


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages in each form that a template may want, without repetition."""
    found: list[list[dict[str, Any]]] = []
    for says_none in (False, True):
        for change in (_as_object, _as_text):
            form = [_with_arguments(message, change) for message in messages]
            if says_none:
                form = [
                    {**message, "content": None} if called(message) and not message.get("content") else message
                    for message in form
                ]
            if form not in found:
                found.append(form)
    return found


def _with_arguments(message: dict[str, Any], change: Any) -> dict[str, Any]:
    """The message with other arguments of its calls; the same one without calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": change(function["arguments"])}}
        elif isinstance(call, Mapping) and "arguments" in call:
            call = {**call, "arguments": change(call["arguments"])}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
