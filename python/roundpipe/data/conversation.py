"""Conversations as records hold them, and what is wrong with those that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# The roles that may follow a role; None stands for the beginning.
_NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


class UnusableError(ValueError):
    """A record that cannot be used. Its text says what is wrong with it, and what was expected.

    Attributes:
        kind: "broken", or "empty" if there is nothing to learn from.
        reason: the same for all records with this mistake.
    """

    def __init__(self, kind: Literal["broken", "empty"], reason: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class Conversation:
    """A conversation that `checked_messages` has checked.

    Attributes:
        messages: as the tokenizer's chat template takes them.
        where: its file and line, for errors.
        tools: handed to the chat template.
        template_options: more arguments for the chat template.
        first_learnt: the first message that may be learnt; those before it are a prompt.
    """

    messages: list[dict[str, Any]]
    where: str
    tools: list[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    first_learnt: int = 0

    def learns(self, index: int) -> bool:
        """Whether a message's words are to be learnt: the assistant's, unless their `weight` is 0."""
        message = self.messages[index]
        return message["role"] == "assistant" and index >= self.first_learnt and message.get("weight", 1) != 0


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Checks roles and contents. A content that is a list of texts becomes one text.

    Raises:
        UnusableError: there are no messages, one has no role or content, a content is not text, or roles are out of
            order.
    """
    if not isinstance(messages, list):
        raise UnusableError("broken", "no list of messages", "has no list of messages, expected at least one message")
    if not messages:
        raise UnusableError("empty", "no messages", "has no list of messages, expected at least one message")
    before: str | None = None
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise _without(index, message)
        role = message["role"]
        calls = role == "assistant" and bool(message.get("tool_calls"))
        if "content" not in message and not calls:
            raise _without(index, message)
        content = message.get("content")
        text = _text_of(content)
        if text is None and not (calls and content is None):
            kind = type(content).__name__
            raise UnusableError(
                "broken", "a content that is no text", f"the content of message {index} is a {kind}, expected text"
            )
        if role not in _NEXT[before]:
            behind = "at the beginning" if before is None else f"behind {before!r}"
            raise UnusableError(
                "broken",
                f"the role {role!r} {behind}" if role in _NEXT else "a role that is not known",
                f"message {index} has the role {role!r} {behind}, expected {' or '.join(_NEXT[before])}",
            )
        if role == "assistant" and message.get("weight", 1) not in (0, 1):
            raise UnusableError(
                "broken",
                "a weight other than 0 and 1",
                f"message {index} has the weight {message['weight']!r}, expected 0 (not learnt) or 1",
            )
        checked.append(message if text is None or text is content else {**message, "content": text})
        before = role
    return checked


def _without(index: int, message: Any) -> UnusableError:
    detail = f"message {index} is {str(message)[:80]!r}, expected an object with role and content"
    return UnusableError("broken", "a message without role or content", detail)


def _text_of(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            return "".join(texts)
    return None
