"""What records mean, by their members, and what is wrong with those that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.records.formats import Pair, Text, Tokens, format_of, item_of
from roundpipe.data.records.options import Format
from roundpipe.data.records.reading import Record
from roundpipe.data.unusable import UnusableError

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
CALLS = [{"type": "function", "function": {"arguments": {"a": 1}, "name": "add"}}]
TURN = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def item(value: Any, form: Format | None = None) -> Any:
    found = form or format_of(value, "here")
    assert found is not None
    return item_of(Record(value, "here"), found)


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ({"messages": [SYSTEM, ASKED, ANSWERED], "text": "rendered"}, [SYSTEM, ASKED, ANSWERED]),
    "messages as JSON": ({"messages": json.dumps([ASKED, ANSWERED])}, [ASKED, ANSWERED]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWERED]},
        [ASKED, ANSWERED],
    ),
    "sharegpt": ({"conversations": TURN}, [ASKED, ANSWERED]),
    "sharegpt with a system": ({"system": "s", "conversations": TURN}, [SYSTEM, ASKED, ANSWERED]),
    "sharegpt with more members": (
        {"conversations": [TURN[0], {"from": "chatgpt", "value": None, "tool_calls": CALLS, "weight": 1, "x": "y"}]},
        [ASKED, {"role": "assistant", "content": None, "tool_calls": CALLS, "weight": 1, "x": "y"}],
    ),
    "sharegpt with a call": (
        {
            "conversations": [
                TURN[0],
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "1"},
                TURN[1],
            ]
        },
        [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "content": "1"},
            ANSWERED,
        ],
    ),
    "turns with two names for the speaker": (
        {"conversations": [{**TURN[0], "role": "user"}, {**TURN[1], "role": "assistant"}]},
        [ASKED, ANSWERED],
    ),
    "turns with the names of messages": ({"conversations": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
    "messages with a system beside them": ({"messages": [ASKED, ANSWERED], "system": "s"}, [SYSTEM, ASKED, ANSWERED]),
    "the same system twice": ({"messages": [SYSTEM, ASKED, ANSWERED], "system": "s"}, [SYSTEM, ASKED, ANSWERED]),
    "prompt": ({"prompt": "q", "completion": "a"}, [ASKED, ANSWERED]),
    "a question and its answer": ({"question": "q", "answer": "a", "id": 3}, [ASKED, ANSWERED]),
    "a question about a text": (
        {"context": "more", "question": "q", "answer": "a"},
        [{"role": "user", "content": "q\n\nmore"}, ANSWERED],
    ),
    "a query and a response": ({"query": "q", "response": "a", "answer": "a"}, [ASKED, ANSWERED]),
    "Dolly": ({"instruction": "q", "context": "", "response": "a", "category": "qa"}, [ASKED, ANSWERED]),
    "Dolly with a context": (
        {"instruction": "q", "context": "more", "response": "a"},
        [{"role": "user", "content": "q\n\nmore"}, ANSWERED],
    ),
    "calls by OpenAI's older names": (
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": {"a": 1}}},
                {"role": "function", "name": "add", "content": "1"},
                ANSWERED,
            ]
        },
        [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "name": "add", "content": "1"},
            ANSWERED,
        ],
    ),
    "an answer first": ({"messages": [OTHER, ASKED, ANSWERED]}, [OTHER, ASKED, ANSWERED]),
    "two turns of one role": ({"messages": [ASKED, ASKED, ANSWERED, OTHER]}, [ASKED, ASKED, ANSWERED, OTHER]),
    "a system in the middle": (
        {"messages": [ASKED, ANSWERED, SYSTEM, ASKED, OTHER]},
        [ASKED, ANSWERED, SYSTEM, ASKED, OTHER],
    ),
    "prompt of messages": ({"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
    "instruction": ({"instruction": "q", "input": "", "output": "a"}, [ASKED, ANSWERED]),
    "an input of a column of numbers": (
        {"instruction": "q", "input": 7, "output": "a"},
        [{"role": "user", "content": "q\n\n7"}, ANSWERED],
    ),
    "instruction with a past": (
        {"instruction": "q", "input": "more", "output": "a", "history": [["q", "a"]], "system": "s"},
        [SYSTEM, ASKED, ANSWERED, {"role": "user", "content": "q\n\nmore"}, ANSWERED],
    ),
}


@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_conversations(name: str) -> None:
    value, messages = CONVERSATIONS[name]
    found = item(value)
    assert isinstance(found, Conversation) and found.messages == messages
    assert found.first_learnt == (2 if name == "prompt of messages" else 0)


def test_tools_and_options_are_handed_on() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    for written in (tools, json.dumps(tools)):
        found = item({"messages": [ASKED, ANSWERED], "tools": written, "chat_template_kwargs": {"think": False}})
        assert found.tools == tools and found.template_options == {"think": False}
    for written in ([], "", "[]", {}, None):
        assert item({"messages": [ASKED, ANSWERED], "tools": written}).tools is None
    assert item({"messages": [ASKED, ANSWERED], "functions": [{"name": "add"}]}).tools == tools
    assert item({"conversations": TURN, "tools": json.dumps(tools[0])}).tools == tools


PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "answers": {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [OTHER]},
    "whole": {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]},
    "whole, with the prompt": {"prompt": "q", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]},
    "another name of the prompt": {"question": " q ", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]},
    "an instruction": {"instruction": "q", "chosen": "a", "rejected": "b"},
    "a turn as each answer": {
        "conversations": TURN[:1],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "turns as answers": {"prompt": "q", "chosen": TURN[1:], "rejected": [{"from": "gpt", "value": "b"}]},
    "a message as each answer": {"messages": [ASKED], "chosen": ANSWERED, "rejected": OTHER},
    "HH-RLHF": {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    "cells of JSON": {"chosen": json.dumps([ASKED, ANSWERED]), "rejected": json.dumps([ASKED, OTHER])},
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_pairs(name: str) -> None:
    found = item(PAIRS[name])
    assert isinstance(found, Pair)
    assert (found.chosen.messages, found.rejected.messages) == ([ASKED, ANSWERED], [ASKED, OTHER])
    assert found.chosen.first_learnt == found.rejected.first_learnt == 1


def test_answers_that_both_share_are_a_prompt() -> None:
    found = item({"chosen": [ASKED, ANSWERED, ASKED, ANSWERED], "rejected": [ASKED, ANSWERED, ASKED, OTHER]})
    assert found.chosen.first_learnt == 3


def test_texts_and_tokens() -> None:
    assert item({"text": "t"}) == item("t") == Text("t")
    assert item({"input_ids": [1, 2]}) == Tokens([1, 2], [1, 2])
    assert item({"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}) == Tokens([1, 2, 3], [-100, 2, 3])
    masks = {"completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}
    assert item({"input_ids": [1, 2, 3], **masks}) == Tokens([1, 2, 3], [-100, -100, 3])
    assert item({"input_ids": [1, 2], "labels": [1, -100], "completion_mask": [0, 1]}) == Tokens([1, 2], [-100, -100])
    assert item({"input_ids": "[1, 2]", "labels": [-100, 2], "attention_mask": [1, 1]}) == Tokens([1, 2], [-100, 2])


def test_formats_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"\[data\] here may be read as preference or as messages, .* \(--format\)"):
        format_of({"messages": [], "chosen": [], "rejected": []}, "here")
    assert format_of({"prompt": "p", "messages": []}, "here") == "messages"
    assert format_of({"body": "x"}, "here") is None and format_of(3, "here") is None
    assert format_of({"messages": None, "text": "x"}, "here") == "text"


BROKEN = [
    ("messages", {"text": "x"}, "a record without messages", "has the members text"),
    ("messages", [1], "no object", "is a list"),
    ("messages", "x", "a text, not a record of messages", ""),
    ("messages", {"messages": "x"}, "no list of messages", ""),
    ("messages", {"messages": "[x"}, "messages that are a text and not JSON", ""),
    ("messages", {"messages": [{**ANSWERED, "function_call": "add"}]}, "a function_call that is no call", "'add'"),
    (
        "messages",
        {"messages": [{**ANSWERED, "function_call": {"arguments": {}}}]},
        "a function_call that is no call",
        "",
    ),
    ("messages", {"messages": [ASKED, ANSWERED], "tools": [{}], "functions": [{"a": 1}]}, "tools and functions", ""),
    (
        "prompt",
        {"question": "q", "answer": "a", "response": "b"},
        "several members of completion, response, answer",
        "",
    ),
    ("instruction", {"instruction": "q", "context": ["x"], "response": "a"}, "context that is no text", "is a list"),
    ("instruction", {"instruction": "q"}, "a record without output or response", "has the members instruction"),
    ("messages", {"messages": [{"role": "bot", "content": ""}]}, "a role that is not known", "'bot'"),
    ("messages", {"messages": [{"role": "user"}]}, "a message without role or content", "message 0"),
    ("messages", {"messages": [{**ASKED, "content": [{"type": "image"}]}]}, "places without pictures", "message 0"),
    ("messages", {"messages": [ASKED, {**ANSWERED, "weight": 2}]}, "a weight other than 0 and 1", "weight 2"),
    ("messages", {"messages": [ASKED, ANSWERED], "tools": "x"}, "tools that are no list of objects", ""),
    ("messages", {"messages": [ASKED, {**ANSWERED, "content": "\ud83d"}]}, "half of a surrogate pair in a text", ""),
    ("sharegpt", {"conversations": [{"from": "bot"}]}, "a speaker that is not known", "'bot'"),
    ("sharegpt", {"conversations": ["x"]}, "a turn that is no object", "turn 0"),
    ("sharegpt", {"conversations": [{**TURN[0], "content": "x"}]}, "a turn with value and content", "which differ"),
    ("sharegpt", {"conversations": [{**TURN[0], "role": "gpt"}]}, "a speaker that is not known", "'human'"),
    ("sharegpt", {"conversations": [{"from": ["x"]}]}, "a speaker that is not known", "turn 0"),
    ("instruction", {"instruction": "q", "input": float("nan"), "output": "a"}, "input that is no text", "float"),
    ("sharegpt", {"conversations": TURN, "system": 4}, "a system that is no text", "is a int"),
    (
        "sharegpt",
        {"conversations": [TURN[0], {"from": "function_call", "value": "add(1)"}]},
        "a function_call that is no call",
        "turn 1",
    ),
    ("messages", {"messages": [SYSTEM, ASKED, ANSWERED], "system": "t"}, "a system beside messages that begin", ""),
    ("instruction", {"instruction": "q", "input": ["x"], "output": "a"}, "input that is no text", "is a list"),
    ("tokens", {"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask that is not a 0 or 1 for each", ""),
    ("tokens", {"input_ids": [1, 2], "assistant_masks": [2, 0]}, "assistant_masks that is not a 0 or 1 for each", ""),
    ("prompt", {"prompt": 3, "completion": "a"}, "a content that is no text", "is a int"),
    ("instruction", {"instruction": "q", "output": "a", "history": ["x"]}, "a history that is no list of pairs", ""),
    ("text", {"text": 3}, "a text that is no text", "int"),
    ("text", {"text": "\udc00"}, "half of a surrogate pair in a text", ""),
    ("preference", {"chosen": "a", "rejected": "b"}, "a pair of texts without prompt", ""),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal", ""),
    ("preference", {"prompt": "q", "chosen": 1, "rejected": 2}, "chosen or rejected that are neither texts nor", ""),
    ("preference", {"prompt": 1, "chosen": "a", "rejected": "b"}, "a prompt that is neither text nor messages", ""),
    (
        "preference",
        {"prompt": "p", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]},
        "chosen and rejected that do not follow the prompt",
        "",
    ),
    ("preference", {"chosen": [ASKED, ANSWERED], "rejected": [SYSTEM, ASKED, OTHER]}, "that do not begin alike", ""),
    ("rated", {"prompt": "q", "completion": "a"}, "an answer without label, and no pair", "completion, prompt"),
    ("rated", {"prompt": "q", "completion": "a", "label": "no"}, "a label that is neither true nor false", "'no'"),
    ("rated", {"prompt": "q", "completion": "a", "label": True, "kto_tag": False}, "several members of label", ""),
    ("rated", {"text": "a", "label": True}, "a label without question and answer", "prompt and completion"),
    ("tokens", {"input_ids": "x"}, "input_ids that are no list of numbers", ""),
    ("tokens", {"input_ids": [1, True]}, "input_ids that are no list of numbers", ""),
    ("tokens", {"input_ids": [1, 2], "labels": [1]}, "labels that are not one number a token", ""),
    ("tokens", {"input_ids": [1, 2], "labels": [2, -100]}, "labels that are neither -100 nor the token", "not shifted"),
    ("tokens", {"input_ids": [1, 2], "attention_mask": [1, 0]}, "an attention_mask other than ones", "padding"),
]
EMPTY = [
    ("messages", {"messages": []}, "no messages"),
    ("messages", {"messages": [ASKED]}, "no answer of the assistant"),
    ("messages", {"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "no answer of the assistant"),
    ("prompt", {"prompt": [ASKED, ANSWERED], "completion": [ASKED]}, "no answer of the assistant"),
    ("text", {"text": " \n"}, "no text"),
    ("tokens", {"input_ids": []}, "no tokens"),
]


@pytest.mark.parametrize(("form", "value", "reason", "detail"), BROKEN)
def test_broken_records(form: Format, value: Any, reason: str, detail: str) -> None:
    with pytest.raises(UnusableError) as found:
        item(value, form)
    assert found.value.kind == "broken" and reason in found.value.reason and detail in str(found.value)


@pytest.mark.parametrize(("form", "value", "reason"), EMPTY)
def test_empty_records(form: Format, value: Any, reason: str) -> None:
    with pytest.raises(UnusableError) as found:
        item(value, form)
    assert (found.value.kind, found.value.reason) == ("empty", reason)


SHARED: dict[str, tuple[Format, dict[str, Any]]] = {
    "pairs of messages": ("preference", {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]}),
    "pairs behind a text": ("preference", {"prompt": "q", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]}),
    "pairs behind messages": ("preference", {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [OTHER]}),
    "pairs of texts": ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "a prompt of messages": ("prompt", {"prompt": [ASKED], "completion": [ANSWERED]}),
    "messages and a text": ("prompt", {"prompt": [ASKED], "completion": "a"}),
    "a text and messages": ("prompt", {"prompt": "q", "completion": [ANSWERED]}),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_system_beside_lists_of_messages_is_read(case: str) -> None:
    form, value = SHARED[case]
    found = item({**value, "system": "s"}, form)
    for talk in (found.chosen, found.rejected) if isinstance(found, Pair) else (found,):
        assert talk.messages[:2] == [SYSTEM, ASKED]
        assert [index for index in range(len(talk.messages)) if talk.learns(index)] == [2]


def test_a_text_beside_the_prompt_of_a_pair_is_read() -> None:
    found = item({"instruction": "q", "input": "more", "chosen": "a", "rejected": "b"}, "preference")
    assert found.chosen.messages[0] == found.rejected.messages[0] == {"role": "user", "content": "q\n\nmore"}


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, [True]),
        ({"prompt": "q", "completion": "a", "label": 0}, [False]),
        ({"prompt": "q", "completion": "a", "label": "False"}, [False]),  # a cell of CSV
        ({"prompt": "q", "completion": "a", "label": "1"}, [True]),
        ({"messages": [ASKED, ANSWERED], "label": False}, [False]),
        ({"conversations": TURN, "kto_tag": True}, [True]),
        ({"instruction": "q", "output": "a", "kto_tag": False}, [False]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [True, False]),
        ({"conversations": TURN[:1], "chosen": TURN[1], "rejected": {"from": "gpt", "value": "b"}}, [True, False]),
    ],
)
def test_answers_that_are_rated(value: dict[str, Any], good: list[bool]) -> None:
    found = item(value, "rated")
    assert [is_good for _, is_good in found.answers] == good
    assert all(talk.messages[0] == ASKED for talk, _ in found.answers)
