"""What is learnt with the templates of popular models, beside the forms of them that TRL marks for training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from roundpipe.data.conversations.conversation import Conversation, checked_messages
from roundpipe.data.conversations.encoder import (
    CLOSED,
    GIVEN,
    NO_THOUGHTS,
    OPENED,
    SHORTER,
    SPLIT,
    ChatEncoder,
    EncodedChat,
)
from roundpipe.data.samples import IGNORED
from roundpipe.data.unusable import UnusableError
from tiny_chat import byte_tokenizer

FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
MARKED = "_training.jinja"
TEMPLATES = sorted(file.name.removesuffix(MARKED) for file in FOLDER.glob(f"*{MARKED}"))
# What the models' own tokenizers have as one token.
OWN = re.compile(
    r"<\|[^|<>\n{}' ]+\|>|<\uff5c[^\uff5c\n{}']+\uff5c>|</?[a-z_]+(?:\|[a-z_]+)?>|\[/?[A-Za-z]+\]|<[a-z_]+\|>"
    r"|<\|[a-z_]+>|<\|[A-Z_]+\|>"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2}}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number", "description": "one"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]
ANSWERED = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("q1"), assistant("a1")],
    "two": [user("q1"), assistant("a1"), user("q2"), assistant("a2")],
    "system": [{"role": "system", "content": "be brief"}, user("q1"), assistant("a1")],
    "a thought": [user("q1"), assistant("a1", reasoning_content="t1")],
    "thoughts": [
        user("q1"),
        assistant("a1", reasoning_content="t1"),
        user("q2"),
        assistant("a2", reasoning_content="t2"),
    ],
    "a thought in the words": [user("q1"), assistant("<think>\nt1\n</think>\n\na1")],
    "a call": [user("q1"), assistant("", tool_calls=[CALL]), ANSWERED, assistant("a1")],
    "a question at the end": [user("q1"), assistant("a1"), user("q2")],
    "a weight": [user("q1"), assistant("a1", weight=0), user("q2"), assistant("a2")],
}

REFUSED = "its own template refuses such a conversation"
NO_CALLS = "it cannot write calls: refused, where the marked form learns an empty answer"
THOUGHTS = "earlier thoughts are learnt, in samples of their own, where the marked form has none"
DROPPED = "a thought is learnt behind the prompt that opens it, where the marked form drops it"
RETURN = "each answer ends with the token that generation stops at, in a sample of its own: <|return|>, not <|end|>"
RESPONSE = "Gemma stops at <|tool_response>, which the marked form does not learn"
SPACE = "the space behind the end is the template's part of the answer, not of the next question"
DIFFERENT: dict[str, dict[str, str]] = {
    **{name: {"a call": REFUSED} for name in ("cohere", "cohere2", "gemma3")},
    "gemma": {"a call": REFUSED, "system": REFUSED},
    **{
        name: {"a call": NO_CALLS}
        for name in (*("idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),)
    },
    "deepseek_r1_distill": {"a call": NO_CALLS, "a thought": DROPPED, "thoughts": DROPPED},
    "deepseekv3": dict.fromkeys(("a thought", "thoughts", "a thought in the words"), DROPPED),
    "diffusion_gemma": {"a call": RESPONSE, "thoughts": THOUGHTS},
    "glm4moe": {"thoughts": THOUGHTS},
    "gptoss": dict.fromkeys(("two", "thoughts", "a question at the end"), RETURN),
    "llava_next": {**dict.fromkeys(CONVERSATIONS, SPACE), "a call": REFUSED},
    **{f"nemotron_3_{name}": {"thoughts": THOUGHTS} for name in ("5_lightning", "nano", "super", "ultra")},
}


def tokenizer_of(*templates: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(bos_token="<bos>", eos_token="<eos>")
    names = {name for template in templates for name in OWN.findall(template)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(names - {"<bos>", "<eos>"})})
    return tokenizer


def stretches(tokenizer: PreTrainedTokenizerFast, tokens: list[int], learnt: list[bool]) -> list[str]:
    found: list[list[int]] = []
    for before, token, is_learnt in zip([False, *learnt], tokens, learnt, strict=False):
        if is_learnt:
            found += [] if before else [[]]
            found[-1].append(token)
    return [str(tokenizer.decode(each)) for each in found]


def by_trl(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """What the marked form learns; of messages whose contents are texts, or parts where it writes texts not at all."""
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
    for form in (plain, parts):
        try:
            found: Any = tokenizer.apply_chat_template(
                form, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:
            continue
        if str(messages[0]["content"]) in str(tokenizer.decode(found["input_ids"])):
            return stretches(tokenizer, found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])
    return []


def ours(name: str, messages: list[dict[str, Any]], tools: Any = None) -> tuple[EncodedChat | UnusableError, list[str]]:
    template, marked = ((FOLDER / f"{name}{end}").read_text() for end in (".jinja", MARKED))
    tokenizer = tokenizer_of(template, marked)
    tokenizer.chat_template = template
    (encoded,) = ChatEncoder(tokenizer).encode([Conversation(checked_messages(messages), "here", tools)])
    if isinstance(encoded, UnusableError):
        return encoded, []
    learnt = [
        text
        for sample in encoded.samples
        for text in stretches(tokenizer, sample["input_ids"], [label != IGNORED for label in sample["labels"]])
    ]
    return encoded, learnt


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learnt_is_what_the_marked_form_learns(name: str) -> None:
    template, marked = ((FOLDER / f"{name}{end}").read_text() for end in (".jinja", MARKED))
    tokenizer = tokenizer_of(template, marked)
    tokenizer.chat_template = marked
    different = DIFFERENT.get(name, {})
    for kind, messages in CONVERSATIONS.items():
        tools = TOOLS if kind == "a call" else None
        expected = by_trl(tokenizer, messages, tools)[1 if kind == "a weight" else 0 :]
        encoded, learnt = ours(name, messages, tools)
        why = different.get(kind)
        if why in (REFUSED, NO_CALLS):
            assert isinstance(encoded, UnusableError), kind
        elif why == SPACE:
            assert learnt == [f"{text} " for text in expected], kind
        elif why is not None:
            assert isinstance(encoded, EncodedChat) and len(learnt) == len(expected) and learnt != expected, kind
            words = [message["content"].split("\n")[-1] for message in messages if message["role"] == "assistant"]
            assert all(word in text for word, text in zip(words, learnt, strict=True)), kind
            if why in (THOUGHTS, DROPPED):
                assert "t1" in learnt[0] and "t1" not in expected[0]
                assert SPLIT in encoded.notes or kind != "thoughts"
        else:
            # A marked form may learn the end of the generation prompt as well, which generation is given.
            assert len(learnt) == len(expected) > 0, (kind, learnt, expected)
            for text, wanted in zip(learnt, expected, strict=True):
                assert wanted.endswith(text) and not re.search("[aqt][12]", wanted.removesuffix(text)), (kind, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_ends_with_a_token_of_its_own(name: str) -> None:
    for kind in ("one", "two"):
        _, learnt = ours(name, CONVERSATIONS[kind])
        for text in learnt:
            assert OWN.search(text.rpartition("a1" if "a1" in text else "a2")[2]) or text.rstrip().endswith("<eos>"), (
                kind,
                text,
            )


def test_notes_say_what_a_template_does() -> None:
    def notes(name: str, kind: str) -> list[str]:
        encoded, _ = ours(name, CONVERSATIONS[kind])
        assert isinstance(encoded, EncodedChat)
        return encoded.notes

    assert notes("glm4moe", "one") == [CLOSED]
    assert notes("deepseek_r1_distill", "one") == notes("nemotron_3_nano", "two") == [OPENED]
    assert notes("deepseek_r1_distill", "a thought") == [GIVEN]
    assert notes("phi3", "two") == [SHORTER]
    assert notes("llama3", "a thought") == [NO_THOUGHTS]
    assert notes("qwen3_5_think", "one") == notes("qwen2_5", "two") == []
