"""Conversations become samples: which tokens count, for chat templates of several styles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roundpipe.data.conversations.conversation import Conversation, checked_messages
from roundpipe.data.conversations.encoder import (
    NO_END,
    NO_THOUGHTS,
    NO_TOOLS,
    SHORTER,
    SPLIT,
    UNSEEN,
    ChatEncoder,
    EncodedChat,
)
from roundpipe.data.conversations.tokens import APART, FIRST_LETTERS
from roundpipe.data.samples import IGNORED
from roundpipe.data.unusable import UnusableError
from tiny_chat import TEMPLATE, byte_tokenizer, learnt, talk

HEADERS = (  # as Llama 3: the text before an answer is a header of the answer's own
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
INSTRUCTIONS = (  # as Mistral: nothing stands between a question and its answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{% endfor %}"
)
NAMES = (  # as Gemma: other names for roles, the system's words within the first question
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}<start>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}{{ m.content }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
)
THOUGHTS = (  # as Qwen 3: thoughts are written only behind the last question, and the last answer has always one
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts"
    " | length > 1 else (m.reasoning_content or '') %}{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>"
    "\n\n{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{%- if m.role == 'assistant' -%}{%- generation -%}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{%- endgeneration -%}{%- else -%}{{ m.content }}<|im_end|>\n"
    "{%- endif -%}{% endfor %}"
)
ENDS = {
    "turns": (TEMPLATE, "{}<|im_end|>\n"),
    "headers": (HEADERS, "{}<|eot|>"),
    "instructions": (INSTRUCTIONS, " {}<eos>"),
    "names": (NAMES, "{}<end>\n"),
}


def using(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(bos_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", "<|eot|>", "<start>", "<end>"]})
    return tokenizer


def encoded(template: str | None, messages: list[dict[str, Any]], all_count: bool = False, **more: Any) -> EncodedChat:
    conversation = Conversation(checked_messages(messages), "here", **more)
    (found,) = ChatEncoder(using(template), everything=all_count).encode([conversation])
    if isinstance(found, UnusableError):
        raise found
    return found


def all_learnt(found: EncodedChat) -> list[list[str]]:
    """Of each sample, the stretches of text whose tokens have labels."""
    return [learnt(sample, using(None)) for sample in found.samples]


def texts(found: EncodedChat) -> list[str]:
    return [using(None).decode(sample["input_ids"]) for sample in found.samples]


@pytest.mark.parametrize("style", list(ENDS))
@given(contents=st.lists(st.text("ab <>|\né🌍", min_size=1, max_size=6).map(str.strip), min_size=2, max_size=6))
def test_only_answers_count(style: str, contents: list[str]) -> None:
    template, end = ENDS[style]
    messages = talk(*contents)
    found = encoded(template, messages)
    assert all_learnt(found) == [[end.format(content) for content in contents[1::2]]] and found.notes == []
    assert found.samples[0]["input_ids"] == using(template).apply_chat_template(messages, return_dict=False)


def test_a_system_s_words_within_the_first_question() -> None:
    assert all_learnt(encoded(NAMES, talk("a", "b", system="be brief"))) == [["b<end>\n"]]


def test_everything_may_count() -> None:
    for template in (TEMPLATE, MARKED, None):
        found = encoded(template, talk("a", "b"), all_count=True)
        assert found.samples[0]["labels"] == found.samples[0]["input_ids"]


def test_answers_of_a_prompt_and_those_of_weight_0_do_not_count() -> None:
    messages = talk("a", "b", "c", "d", "e", "f")
    assert all_learnt(encoded(TEMPLATE, messages, first_learnt=4)) == [["f<|im_end|>\n"]]
    messages[5]["weight"] = 0
    assert all_learnt(encoded(TEMPLATE, messages)) == [["b<|im_end|>\n", "d<|im_end|>\n"]]
    assert all_learnt(encoded(None, messages)) == [["b<eos>", "d<eos>"]]
    assert all_learnt(encoded(MARKED, messages)) == [["b<|im_end|>", "d<|im_end|>"]]
    at_once = MARKED.replace("{%- generation -%}", "").replace("{% for", "{% generation %}{% for", 1)
    at_once = at_once.replace("{%- endgeneration -%}", "") + "{% endgeneration %}"
    with pytest.raises(UnusableError, match="the chat template marks 1 stretches for 3 answers"):
        encoded(at_once, messages)


def test_a_template_that_drops_earlier_thoughts() -> None:
    first, last = "<think>\nhm\n</think>\n\none", "<think>\nso\n</think>\n\ntwo"
    found = encoded(THOUGHTS, talk("a", first, "b", last))
    # The first answer is learnt as the model has to write it, where its thoughts are still there.
    assert texts(found) == [
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        f"<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n{last}<|im_end|>\n",
    ]
    assert all_learnt(found) == [[f"{first}<|im_end|>\n"], [f"{last}<|im_end|>\n"]] and found.notes == [SPLIT]


def test_thoughts_beside_the_content_are_not_lost_either() -> None:
    messages = talk("a", "one", "b", "two")
    messages[1]["reasoning_content"] = "hm"
    found = encoded(THOUGHTS, messages)
    assert all_learnt(found)[0] == ["<think>\nhm\n</think>\n\none<|im_end|>\n"] and found.notes == [SPLIT]


def test_answers_without_thoughts_stay_in_one_sample() -> None:
    found = encoded(THOUGHTS, talk("a", "one", "b", "two"))
    assert all_learnt(found) == [["one<|im_end|>\n", "<think>\n\n</think>\n\ntwo<|im_end|>\n"]]
    assert found.notes == [SHORTER]


def test_tools_and_calls_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    found = encoded(CALLS, messages, tools=tools)
    written = f"<call>{json.dumps(call['function'])}</call><|im_end|>\n"
    assert all_learnt(found) == [[written, "four<|im_end|>\n"]]
    assert texts(found)[0].startswith(f"tools: {json.dumps(tools)}\n")
    with pytest.raises(UnusableError, match="no chat template that writes them"):
        encoded(None, messages, tools=tools)


def test_marks_of_a_template_are_those_of_transformers() -> None:
    messages = talk("a", "é 🌍", "b", "<think>x</think>c")
    tokenizer = using(MARKED)
    expected: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    found = encoded(MARKED, messages)
    (sample,) = found.samples
    assert sample["input_ids"] == expected["input_ids"]
    assert [label != IGNORED for label in sample["labels"]] == [bool(mark) for mark in expected["assistant_masks"]]
    assert all_learnt(found) == [["é 🌍<|im_end|>", "c<|im_end|>"]] and found.notes == [NO_THOUGHTS]


LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def merging(pieces: Any, merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A tokenizer in which a space and a letter may be one token."""
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet(), "\u2581", "\n"})
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pieces
    is_bytes = isinstance(pieces, pre_tokenizers.ByteLevel)
    inner.decoder = decoders.ByteLevel() if is_bytes else decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=LINES, eos_token="<eos>", pad_token="<eos>")


def test_a_token_of_the_prompt_and_the_answer_is_cut_as_generation_cuts_it() -> None:
    tokenizer = merging(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), [("\u0120", "t"), ("h", "r")]
    )
    (found,) = ChatEncoder(tokenizer).encode([Conversation(talk("a", "three"), "here")])
    assert isinstance(found, EncodedChat) and found.notes == [NO_END, APART]
    (sample,) = found.samples
    asked = tokenizer.apply_chat_template(talk("a"), tokenize=True, add_generation_prompt=True, return_dict=False)
    assert sample["input_ids"][: len(asked)] == asked
    assert sample["labels"][: len(asked)] == [IGNORED] * len(asked)
    assert tokenizer.decode(sample["labels"][len(asked) :]) == "three\n"
    whole = tokenizer.apply_chat_template(talk("a", "three"), tokenize=True, return_dict=False)
    assert sample["input_ids"] != whole and tokenizer.decode(sample["input_ids"]) == tokenizer.decode(whole)


def test_a_tokenizer_that_writes_a_space_before_each_text_says_what_is_not_learnt() -> None:
    tokenizer = merging(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), [("\u2581", "t")])
    (found,) = ChatEncoder(tokenizer).encode([Conversation(talk("a", "three"), "here")])
    assert isinstance(found, EncodedChat) and FIRST_LETTERS in found.notes
    assert "hree" in tokenizer.decode([each for each in found.samples[0]["labels"] if each != IGNORED])


def test_arguments_of_calls_are_objects_or_texts_as_the_template_wants() -> None:
    def calling(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return [*talk("2 + 2?"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    expected = '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>\n'
    for arguments in ({"a": 2}, '{"a": 2}'):
        assert all_learnt(encoded(CALLS, calling(arguments))) == [[expected]]
    as_text = CALLS.replace("{{ call.function | tojson }}", "{{ call.function.name + call.function.arguments }}")
    for arguments in ({"a": 2}, '{"a": 2}'):
        assert all_learnt(encoded(as_text, calling(arguments))) == [['<call>add{"a": 2}</call><|im_end|>\n']]
    with pytest.raises(UnusableError, match="writes nothing of message 1"):
        encoded(TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }} "), calling({"a": 2}))


def test_what_a_template_leaves_out_is_noted() -> None:
    silent = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    silent += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    found = encoded(
        silent, talk("a", "b", system="be brief"), tools=[{"type": "function", "function": {"name": "add"}}]
    )
    assert found.notes == [NO_TOOLS, UNSEEN] and all_learnt(found) == [["b<|im_end|>\n"]]
    assert encoded(silent, talk("a", "b", "c", "d")).notes == []


def test_an_answer_may_be_a_token_of_its_own() -> None:
    assert all_learnt(encoded(TEMPLATE, talk("a", "<|end|>"))) == [["<|end|><|im_end|>\n"]]


def test_an_answer_may_come_first() -> None:
    for template in (TEMPLATE, HEADERS):
        found = encoded(template, [{"role": "assistant", "content": "hello"}, *talk("a", "b")])
        assert [text[0] for text in all_learnt(found)[0]] == ["h", "b"] and found.notes == []


def test_a_bad_conversation_does_not_disturb_its_neighbours() -> None:
    good, bad = talk("a", "b"), talk("a", "b", system="no")
    encoder = ChatEncoder(using(INSTRUCTIONS))
    first, second, third = encoder.encode([Conversation(each, "here") for each in (good, bad, good)])
    assert isinstance(second, UnusableError) and second.kind == "broken"
    assert second.reason == "the chat template failed: no system"
    assert first == third and isinstance(first, EncodedChat)


def test_options_of_the_template() -> None:
    template = "{{ style }}: {% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}a{% endif %}"
    found = encoded(template, talk("x", "y"), template_options={"style": "short"})
    assert texts(found) == ["short: ux;ay;"] and all_learnt(found) == [["y;"]]
