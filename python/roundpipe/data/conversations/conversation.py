"""Conversations as records hold them, and what is wrong with those that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundpipe.data.pictures.content import Medium
from roundpipe.data.unusable import UnusableError

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """A conversation that `checked_messages` has checked.

    Attributes:
        messages: as the tokenizer's chat template takes them.
        where: its file and line, for errors.
        tools: handed to the chat template.
        template_options: more arguments for the chat template.
        first_learnt: the first message that may be learnt; those before it are a prompt.
        pictures: the pictures, videos and sounds that marks stand for in the messages, in their order: as a record
            names them, or files.
    """

    messages: list[dict[str, Any]]
    where: str
    tools: list[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    first_learnt: int = 0
    pictures: tuple[Medium, ...] = ()

    def learns(self, index: int) -> bool:
        """Whether a message's words are to be learnt: the assistant's, unless their `weight` is 0."""
        message = self.messages[index]
        return message["role"] == "assistant" and index >= self.first_learnt and message.get("weight", 1) != 0


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Checks roles and contents, and puts older names of OpenAI's right: the role "function" and a `function_call`. A
    content that is a list of texts becomes one text. Which role follows which is the chat template's affair.

    Raises:
        UnusableError: there are no messages, one has no role or content, or a content is not text.
    """
    if not isinstance(messages, list):
        raise UnusableError("broken", "no list of messages", "has no list of messages, expected at least one message")
    if not messages:
        raise UnusableError("empty", "no messages", "has no list of messages, expected at least one message")
    checked = []
    for index, given in enumerate(messages):
        if not isinstance(given, dict) or "role" not in given:
            raise _without(index, given)
        message = _renamed(given, index)
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
        if role not in _ROLES:
            raise UnusableError(
                "broken",
                "a role that is not known",
                f"message {index} has the role {role!r}, expected {', '.join(_ROLES)}",
            )
        if role == "assistant" and message.get("weight", 1) not in (0, 1):
            raise UnusableError(
                "broken",
                "a weight other than 0 and 1",
                f"message {index} has the weight {message['weight']!r}, expected 0 (not learnt) or 1",
            )
        checked.append(message if text is None or text is content else {**message, "content": text})
    return checked


def _renamed(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message by the names of today: OpenAI's "function" is a tool, and its `function_call` the only call."""
    call = message.get("function_call")
    if message["role"] != "function" and call is None:
        return message
    renamed = {name: value for name, value in message.items() if name != "function_call"}
    if message["role"] == "function":
        renamed["role"] = "tool"
    if call is None:
        return renamed
    calls = [] if message.get("tool_calls") else calls_of([call])
    if not calls:
        detail = f"message {index} has the function_call {str(call)[:80]!r}, expected one with name and arguments alone"
        raise UnusableError("broken", "a function_call that is no call", detail)
    return {"content": None, **renamed, "tool_calls": calls}


def calls_of(functions: list[Any]) -> list[dict[str, Any]]:
    """The `tool_calls` of objects with a name and arguments; none if one of them is something else."""
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        return []
    return [{"type": "function", "function": {"arguments": {}, **each}} for each in functions]


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
