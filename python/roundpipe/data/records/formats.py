"""What records mean: texts, conversations, preference pairs or tokens, by the names of their members."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundpipe.data.conversations.conversation import Conversation, calls_of, checked_messages
from roundpipe.data.pictures.content import has_pictures, mark_pictures
from roundpipe.data.records.options import Format
from roundpipe.data.records.reading import Record
from roundpipe.data.samples import IGNORED
from roundpipe.data.unusable import UnusableError

# The members that tell a format, the first that fits; those of the first group exclude each other.
_EXCLUSIVE: dict[Format, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}
# Each with other names of these members.
_OTHERS: dict[Format, tuple[str, ...]] = {
    "prompt": ("prompt|question|query", "completion|response|answer"),
    "instruction": ("instruction", "output|response"),
    "text": ("text",),
}
_MORE = "input|context"  # of a question
_RATING = "label|kto_tag"  # of one answer
_RATINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # also as a cell of CSV
_HH = re.compile(r"(?:^|\n\n)(Human|Assistant):")
NO_ANSWER = "no answer of the assistant"
"""The reason against a conversation in which nothing is learnt."""
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_OF_TURNS = ("from", "role", "value", "content")


@dataclass(frozen=True)
class Text:
    """A text, or a piece of a long one."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Tokens:
    """Tokens, with labels that are -100 or the token."""

    tokens: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Pair:
    """A preferred and a rejected end of the same conversation."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class Graded:
    """Conversations, each with whether its learnt answers are good: one, or the two of a pair."""

    answers: list[tuple[Conversation, bool]]


Item = Text | Tokens | Conversation | Pair | Graded


def format_of(value: Any, where: str) -> Format | None:
    """The format that a record's members tell; None if they tell none.

    Raises:
        ValueError: they tell several that exclude each other.
    """
    if isinstance(value, str):
        return "text"
    if not isinstance(value, Mapping):
        return None
    found = [name for name, members in _EXCLUSIVE.items() if all(value.get(each) is not None for each in members)]
    if "preference" in found and isinstance(value["chosen"], Mapping):
        found = ["preference"]  # a turn as each answer, behind those of both
    if len(found) > 1:
        raise ValueError(
            f"[data] {where} may be read as {' or as '.join(found)}, expected one of them; say which by "
            "format (--format)"
        )
    found += [name for name, members in _OTHERS.items() if all(_names_in(value, each) for each in members)]
    return found[0] if found else None


def advice(value: Any) -> str:
    """What to type for a record whose members no format has."""
    members = value if isinstance(value, Mapping) else {}
    lists = [name for name, each in members.items() if isinstance(each, list) and each and isinstance(each[0], Mapping)]
    texts = [name for name, each in members.items() if isinstance(each, str) and each.strip()]
    if len(lists) == 1:
        named = [f"messages={lists[0]}"]
    elif len(texts) == 1:
        named = [f"text={texts[0]}"]
    elif len(texts) == 2:
        named = [f"prompt={texts[0]}", f"completion={texts[1]}"]
    else:
        named = ["prompt=MEMBER", "completion=MEMBER"]
    return " ".join(f"--fields {shlex.quote(each)}" for each in named)


def names_of(name: str) -> list[str]:
    """All names of a member that has several; just this one, if it has no others."""
    groups = [names.split("|") for members in _OTHERS.values() for names in members] + [_MORE.split("|")]
    return next((group for group in groups if name in group), [name])


def _names_in(value: Mapping[str, Any], names: str) -> list[str]:
    """Which of the names, with "|" between them, are those of members that are there."""
    return [name for name in names.split("|") if value.get(name) is not None]


def _member(value: Mapping[str, Any], names: str) -> Any:
    """The member of one of these names; None: there is none.

    Raises:
        UnusableError: there are several with other values.
    """
    there = _names_in(value, names)
    if any(value[name] != value[there[0]] for name in there[1:]):
        raise UnusableError("broken", f"several members of {names.replace('|', ', ')}", f"it has {' and '.join(there)}")
    return value[there[0]] if there else None


def item_of(record: Record, form: Format) -> Item:
    """Takes a record as the format says.

    Raises:
        UnusableError: it is not of this format, or holds nothing to learn from.
    """
    if isinstance(record.value, str):
        if form != "text":
            raise UnusableError("broken", f"a text, not a record of {form}", "is a text, expected a record")
        return _text(record.value, record)
    if not isinstance(record.value, Mapping):
        kind = type(record.value).__name__
        raise UnusableError("broken", "no object", f"is a {kind}, expected an object with members")
    value = record.value
    if form == "rated":
        return _rated(record)
    expected = {**_EXCLUSIVE, **_OTHERS}[form]
    missing = [names for names in expected if not _names_in(value, names)]
    if missing:
        reason = f"a record without {' and '.join(names.replace('|', ' or ') for names in missing)}"
        named = " ".join(f"--fields {names.split('|')[0]}=MEMBER" for names in missing)
        detail = f"has the members {', '.join(sorted(map(str, value)))}; say which it is by {named}"
        raise UnusableError("broken", reason, detail)
    if form == "text":
        if has_pictures(value):
            raise UnusableError("broken", "pictures beside a text", "expected a conversation, such as messages")
        return _text(value["text"], record)
    if form == "tokens":
        return _tokens(value)
    if form == "preference":
        return _pair(value, record.where)
    if form == "messages":
        messages = _list(value["messages"], "messages")
        whole = _with_system(value, messages) if isinstance(messages, list) else messages
        return _conversation(whole, value, record.where)
    if form == "sharegpt":
        return _conversation(_sharegpt(value), value, record.where)
    if form == "prompt":
        return _prompt(value, record.where)
    return _conversation(_instruction(value), value, record.where)


def _text(text: Any, record: Record) -> Text:
    if not isinstance(text, str):
        raise UnusableError("broken", "a text that is no text", f"its text is a {type(text).__name__}")
    _check_unicode(text)
    if record.begins and record.ends and not text.strip():
        raise UnusableError("empty", "no text", "")
    return Text(text, record.begins, record.ends)


def _conversation(messages: Any, value: Mapping[str, Any], where: str, first_learnt: int = 0) -> Conversation:
    messages, pictures = mark_pictures(messages, value)
    checked = checked_messages(messages)
    for message in checked:
        _check_unicode(str(message.get("content") or ""))
    tools = _tools(value)
    options = value.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise UnusableError("broken", "chat_template_kwargs that are no object", "")
    found = Conversation(checked, where, tools, options, first_learnt, tuple(pictures))
    if not any(found.learns(index) for index in range(len(checked))):
        raise UnusableError("empty", NO_ANSWER, "")
    return found


def _tools(value: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the conversation may call, also by OpenAI's older name `functions`; None without any."""
    given = {name: _list(value.get(name), name) for name in ("tools", "functions")}
    found = {name: [each] if isinstance(each, dict) and each else each for name, each in given.items() if each}
    for name, tools in found.items():
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UnusableError("broken", f"{name} that are no list of objects", f"its {name} are no list of objects")
    if len(found) > 1:
        raise UnusableError("broken", "tools and functions", "expected one of them")
    if "functions" in found:
        return [{"type": "function", "function": function} for function in found["functions"]]
    return found.get("tools")


def _sharegpt(value: Mapping[str, Any]) -> Any:
    turns = _turns(value)
    return _with_system(value, turns) if isinstance(turns, list) else turns


def _turns(value: Mapping[str, Any]) -> Any:
    """ShareGPT's turns as messages."""
    turns = _list(value["conversations"], "conversations")
    if not isinstance(turns, list):
        return turns
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise UnusableError("broken", "a turn that is no object", f"turn {index} is a {type(turn).__name__}")
        # Some have both names, as in {"from": "human", "role": "user"}.
        speakers = [turn[name] for name in ("from", "role") if turn.get(name) is not None]
        roles = {_SPEAKERS.get(str(each)) for each in speakers}
        speaker = speakers[0] if speakers else None
        if len(roles) != 1 or None in roles:
            detail = f"turn {index} is from {speaker!r}, expected one of {', '.join(_SPEAKERS)}"
            raise UnusableError("broken", "a speaker that is not known", detail)
        # The template sees every other member, as if the turn were a message.
        message = {name: each for name, each in turn.items() if name not in _OF_TURNS and each is not None}
        content = _content_of(turn, index)
        if speaker == "function_call":
            message |= {"content": None, "tool_calls": _calls(content, index)}
        else:
            message["content"] = content
        messages.append({"role": roles.pop(), **message})
    return messages


def _content_of(turn: Mapping[str, Any], index: int) -> Any:
    """Its `value`, or the `content` that a message has."""
    value, content = turn.get("value"), turn.get("content")
    if value is not None and content is not None and value != content:
        detail = f"turn {index} has value and content, which differ, expected one of them"
        raise UnusableError("broken", "a turn with value and content", detail)
    return content if value is None else value


def _calls(text: Any, index: int) -> list[dict[str, Any]]:
    """Calls of a turn from "function_call", as LLaMA-Factory has them: JSON of an object with name and arguments."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        found = None
    calls = calls_of(found if isinstance(found, list) else [found])
    if not calls:
        detail = f"turn {index} is {str(text)[:80]!r}, expected JSON with name and arguments"
        raise UnusableError("broken", "a function_call that is no call", detail)
    return calls


def _prompt(value: Mapping[str, Any], where: str) -> Conversation:
    prompt, completion = (_member(value, names) for names in _OTHERS["prompt"])
    asked, answered = isinstance(prompt, list), isinstance(completion, list)
    if not (asked or answered):
        messages = [_said("user", _with_more(prompt, value)), _said("assistant", completion)]
        return _conversation(_with_system(value, messages), value, where)
    before = _with_system(value, prompt if asked else [_said("user", _with_more(prompt, value))])
    after = completion if answered else [_said("assistant", completion)]
    return _conversation([*before, *after], value, where, len(before))


def _instruction(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    question = _with_more(value["instruction"], value)
    messages = []
    for turn in value.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise UnusableError("broken", "a history that is no list of pairs", "expected [[question, answer], ...]")
        messages += [_said("user", turn[0]), _said("assistant", turn[1])]
    return _with_system(
        value, [*messages, _said("user", question), _said("assistant", _member(value, _OTHERS["instruction"][1]))]
    )


def _with_more(question: Any, value: Mapping[str, Any]) -> Any:
    """A question and, below it, the text that it is about."""
    more = _member(value, _MORE)
    is_number = isinstance(more, int) or (isinstance(more, float) and math.isfinite(more))
    if is_number and not isinstance(more, bool):
        more = str(more)  # as a column of a table is read whose texts are all numbers
    if more is not None and not isinstance(more, str):
        name = _names_in(value, _MORE)[0]
        raise UnusableError("broken", f"{name} that is no text", f"its {name} is a {type(more).__name__}")
    return f"{question}\n\n{more}" if more and more.strip() and isinstance(question, str) else question


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with_system(value: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind the record's `system`, unless they begin with it."""
    system = value.get("system")
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, str):
        raise UnusableError("broken", "a system that is no text", f"its system is a {type(system).__name__}")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") not in ("system", "developer"):
        return [_said("system", system), *messages]
    if first.get("content") != system:
        raise UnusableError("broken", "a system beside messages that begin with another one", "")
    return messages


def _pair(value: Mapping[str, Any], where: str) -> Pair:
    before = _asked(value)
    ends = [_answered(value[name], name) for name in ("chosen", "rejected")]
    if not before and all(isinstance(end, str) for end in ends):
        ends = [_human_and_assistant(end) for end in ends]
    if any(isinstance(end, str) for end in ends) and not before:
        detail = "expected the prompt as a member, such as --fields prompt=MEMBER"
        raise UnusableError("broken", "a pair of texts without prompt", detail)
    ends = [[_said("assistant", end)] if isinstance(end, str) else end for end in ends]
    if all(end[0].get("role") == "assistant" for end in ends) and before:
        ends = [[*before, *end] for end in ends]
    ends = [_with_system(value, end) for end in ends]
    shared = 0
    while shared < min(map(len, ends)) and ends[0][shared] == ends[1][shared]:
        shared += 1
    if shared == len(ends[0]) == len(ends[1]):
        raise UnusableError("broken", "chosen and rejected are equal", "")
    # A prompt that the ends hold as well is only compared.
    asked = _stripped(before[-1].get("content")) if before and isinstance(before[-1], dict) else None
    if asked is not None and not any(_stripped(message.get("content")) == asked for message in ends[0][:shared]):
        raise UnusableError("broken", "chosen and rejected that do not follow the prompt", "")
    if not shared:
        raise UnusableError("broken", "chosen and rejected that do not begin alike", "expected the same prompt in both")
    chosen, rejected = (_conversation(end, value, where, shared) for end in ends)
    if chosen.pictures or rejected.pictures:
        raise UnusableError("broken", "pictures where answers are compared", "expected text alone")
    return Pair(chosen, rejected)


def _asked(value: Mapping[str, Any]) -> list[Any]:
    """The messages before the answers of a pair: its prompt, or the turns of LLaMA-Factory's form; empty without."""
    prompt = _member(value, f"{_OTHERS['prompt'][0]}|instruction")
    answers = [value["chosen"], value["rejected"]]
    if prompt is None and all(isinstance(answer, Mapping | str) for answer in answers):
        if value.get("conversations") is not None:
            prompt = _turns(value)
        elif value.get("messages") is not None:
            prompt = _list(value["messages"], "messages")
    if isinstance(prompt, str) and not prompt.lstrip().startswith("["):
        return [_said("user", _with_more(prompt, value))]
    before = _list(prompt, "prompt") if prompt is not None else []
    if isinstance(before, str):
        return [_said("user", _with_more(before, value))]
    if not isinstance(before, list):
        raise UnusableError("broken", "a prompt that is neither text nor messages", "")
    return before


def _answered(answer: Any, name: str) -> Any:
    """An answer of a pair: a text, or messages."""
    if isinstance(answer, str) and not answer.lstrip().startswith(("[", "{")):
        return answer
    found = _list(answer, name) if not isinstance(answer, str) else _json_or_text(answer)
    found = [found] if isinstance(found, Mapping) else found
    if isinstance(found, str):
        return found
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        detail = f"its {name} is {str(answer)[:80]!r}, expected a text, a message or a list of messages"
        raise UnusableError("broken", "chosen or rejected that are neither texts nor messages", detail)
    return _turns({"conversations": found}) if all("from" in each for each in found) else found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _human_and_assistant(text: str) -> Any:
    """The messages of a text in the form of Anthropic's HH-RLHF; another text as it is."""
    parts = _HH.split(text.strip("\n"))
    if parts[0].strip() or len(parts) < 3:
        return text
    roles = {"Human": "user", "Assistant": "assistant"}
    return [_said(roles[role], said.strip()) for role, said in zip(parts[1::2], parts[2::2], strict=True)]


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def leaves_out_more(value: Any, item: Item) -> bool:
    """Whether a record's `input` or `context` stands in none of its messages, since they say all that is asked."""
    if isinstance(item, Text | Tokens):
        return False
    talk = item.chosen if isinstance(item, Pair) else item.answers[0][0] if isinstance(item, Graded) else item
    said = [str(message.get("content") or "") for message in talk.messages]
    texts = [value[name] for name in _names_in(value, _MORE) if isinstance(value[name], str) and value[name].strip()]
    return any(all(text not in content for content in said) for text in texts)


def is_bad(value: Any) -> bool:
    """Whether a record says that its answer is a bad one."""
    return isinstance(value, Mapping) and any(value.get(name) is False for name in _RATING.split("|"))


def _rated(record: Record) -> Graded:
    """An answer and whether it is good, or a pair of one that is and one that is not."""
    value, where = record.value, record.where
    rating = _member(value, _RATING)
    if rating is None:
        if all(value.get(name) is not None for name in ("chosen", "rejected")):
            pair = _pair(value, where)
            return Graded([(pair.chosen, True), (pair.rejected, False)])
        detail = f"has the members {', '.join(sorted(map(str, value)))}, expected label, true or false"
        raise UnusableError("broken", "an answer without label, and no pair of chosen and rejected", detail)
    is_good = _RATINGS.get(str(rating).strip().lower())
    if is_good is None:
        detail = f"its label is {str(rating)[:40]!r}, expected true, false, 1 or 0"
        raise UnusableError("broken", "a label that is neither true nor false", detail)
    forms = [form for form in ("messages", "sharegpt") if value.get(_EXCLUSIVE[form][0]) is not None]
    others: tuple[Format, ...] = ("prompt", "instruction")
    forms += [form for form in others if all(_names_in(value, each) for each in _OTHERS[form])]
    talk = item_of(record, forms[0]) if forms else None  # type: ignore[arg-type]
    if not isinstance(talk, Conversation):
        raise UnusableError("broken", "a label without question and answer", "expected prompt and completion")
    if talk.pictures:
        raise UnusableError("broken", "pictures where answers are compared", "expected text alone")
    return Graded([(talk, is_good)])


def _tokens(value: Mapping[str, Any]) -> Tokens:
    tokens, labels = _list(value["input_ids"], "input_ids"), _list(value.get("labels"), "labels")
    if not _numbers(tokens):
        raise UnusableError("broken", "input_ids that are no list of numbers", "")
    if not tokens:
        raise UnusableError("empty", "no tokens", "")
    mask = _list(value.get("attention_mask"), "attention_mask")
    if mask is not None and (not _numbers(mask) or list(mask) != [1] * len(tokens)):
        raise UnusableError("broken", "an attention_mask other than ones", "leave out padding")
    learnt = _masks(value, len(tokens))
    if labels is None:
        return Tokens(list(tokens), _masked(tokens, learnt))
    if not _numbers(labels) or len(labels) != len(tokens):
        raise UnusableError("broken", "labels that are not one number a token", "")
    if any(label not in (IGNORED, token) for token, label in zip(tokens, labels, strict=True)):
        raise UnusableError("broken", "labels that are neither -100 nor the token", "labels are not shifted")
    return Tokens(list(tokens), _masked(labels, learnt))


def _masks(value: Mapping[str, Any], count: int) -> list[bool]:
    """Which tokens may be learnt, by the masks that TRL writes beside tokens: those that each of them has."""
    learnt = [True] * count
    for name in ("completion_mask", "assistant_masks"):
        mask = _list(value.get(name), name)
        if mask is None:
            continue
        if not _numbers(mask) or len(mask) != count or not set(mask) <= {0, 1}:
            raise UnusableError("broken", f"{name} that is not a 0 or 1 for each token", "")
        learnt = [before and one == 1 for before, one in zip(learnt, mask, strict=True)]
    return learnt


def _masked(labels: list[int], learnt: list[bool]) -> list[int]:
    return [label if one else IGNORED for label, one in zip(labels, learnt, strict=True)]


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _list(value: Any, name: str) -> Any:
    """A list, or an object, that a cell of CSV, or a column of a data set, may hold as JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise UnusableError("broken", f"{name} that are a text and not JSON", "") from None
    return value


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableError("broken", "half of a surrogate pair in a text", "expected Unicode") from None
