"""Chat files: what is read, which tokens are learnt, and what is refused by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roundpipe.data.chat import (
    Conversation,
    encode_chat,
    load_chat,
    load_tokenizer,
    padding_token_id,
    read_chat,
)
from tiny_chat import learnt, talk

TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOT_APPENDING = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
FAILING = "{{ raise_exception('no such role') }}"


def tokenizer(template: str | None = None, **special: str | None) -> PreTrainedTokenizerFast:
    """A token a byte, and special tokens."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>"} | special
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **{k: v for k, v in names.items() if v is not None})
    made.chat_template = template
    return made


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    return path


# --- which tokens are learnt ---


def test_without_a_template_each_message_is_a_line() -> None:
    using = tokenizer()
    (sample,) = encode_chat(Conversation(talk("2 + 2?", "4", "Sure?", ""), "here"), using)
    assert using.decode(sample["input_ids"]) == "<bos>user: 2 + 2?\nassistant: 4<eos>user: Sure?\nassistant: <eos>"
    assert learnt(sample, using) == ["4<eos>", "<eos>"]
    (without_start,) = encode_chat(Conversation(talk("a", "b"), "here"), tokenizer(bos_token=None))
    assert using.decode(without_start["input_ids"]) == "user: a\nassistant: b<eos>"


TOKENIZER = tokenizer(TURNS)


def test_templates_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"file:3: message 1: the chat template renders .* differently"):
        encode_chat(Conversation(talk("a", "b", "c", "d"), "file:3"), tokenizer(NOT_APPENDING))
    with pytest.raises(ValueError, match="file:3: the tokenizer's chat template failed: no such role"):
        encode_chat(Conversation(talk("a", "b"), "file:3"), tokenizer(FAILING))
    with pytest.raises(ValueError, match="neither a chat template nor an end-of-text token"):
        encode_chat(Conversation(talk("a", "b"), "file:3"), tokenizer(eos_token=None))


def test_a_tokenizer_without_characters_is_refused() -> None:
    class Slow:
        chat_template = TURNS
        is_fast = False

    using: Any = Slow()
    with pytest.raises(ValueError, match="Slow does not say which characters"):
        encode_chat(Conversation(talk("a", "b"), "file:3"), using)


def test_what_pads() -> None:
    using = tokenizer()
    assert padding_token_id(using) == using.convert_tokens_to_ids("<eos>")
    assert padding_token_id(tokenizer(pad_token="<|im_end|>")) == using.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(ValueError, match="no padding token and no end-of-text token"):
        padding_token_id(tokenizer(eos_token=None))


# --- files ---


def test_both_kinds_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": talk("a\u2028b", "c")}, {"prompt": "p", "completion": "q"})
    path.write_text("\n" + path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    first, second = read_chat(path)
    assert first.messages == talk("a\u2028b", "c") and first.where == f"{path}:2"
    assert second.messages == talk("p", "q") and second.where == f"{path}:3"


def test_a_file_is_read_as_prepared_data_is(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = write(
        tmp_path / "chat.jsonl",
        {"messages": talk("a", "b"), "tools": tools, "chat_template_kwargs": {"thinking": False}},
        {"conversations": turns},
        {"instruction": "p", "output": "q"},
    )
    text = path.read_text()
    for name, content in {
        "b.jsonl": b"\xef\xbb\xbf" + text.encode(),
        "c.jsonl.gz": gzip.compress(text.encode()),
    }.items():
        (tmp_path / name).write_bytes(content)
        first, second, third = read_chat(tmp_path / name)
        assert first.tools == tools and first.template_options == {"thinking": False}
        assert second.messages == talk("a", "b") and third.messages == talk("p", "q")
    (tmp_path / "chat").write_text(text)  # without a suffix, too
    assert [each.messages for each in read_chat(tmp_path / "chat")] == [each.messages for each in read_chat(path)]


def test_held_out_conversations_are_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", *({"messages": talk("q", f"answer {index}")} for index in range(20)))
    data = load_chat(path, TOKENIZER, held_out=0.2, seed=3)
    assert len(data.held_out) == 4 and len(data.train) == 16 and data.without_answer == []
    assert load_chat(path, TOKENIZER, held_out=0.2, seed=3) == data
    assert load_chat(path, TOKENIZER, held_out=0.2, seed=4).held_out != data.held_out
    everything = load_chat(path, TOKENIZER)
    assert everything.held_out == [] and sorted(map(str, data.train + data.held_out)) == sorted(
        map(str, everything.train)
    )
    assert len(load_chat(path, TOKENIZER, held_out=0.001).held_out) == 1


def test_conversations_without_an_answer_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": talk("a", "b")}, {"messages": talk("only a question")})
    data = load_chat(path, TOKENIZER)
    assert len(data.train) == 1 and data.without_answer == [f"{path}:2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "is a list, expected an object"),
        ('{"text": "a"}', r"has the keys \['text'\], expected messages, or prompt and completion"),
        ('{"prompt": "a"}', r"has the keys \['prompt'\]"),
        ('{"messages": []}', "has no list of messages"),
        ('{"messages": "a"}', "has no list of messages"),
        ('{"messages": [{"role": "user"}]}', "message 0 is .* expected an object with role and content"),
        ('{"messages": [{"role": "user", "content": null}]}', "content of message 0 is a NoneType, expected text"),
        ('{"prompt": 3, "completion": "a"}', "content of message 0 is a int"),
        ('{"messages": [{"role": "bot", "content": ""}]}', "message 0 has the role 'bot', expected system"),
    ],
)
def test_bad_lines_are_refused_by_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": talk("a", "b")}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"\[chat\] .*chat\.jsonl:2.*" + message):
        read_chat(path)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_chat(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="is empty"):
        read_chat(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_chat(tmp_path / "binary.jsonl")
    (tmp_path / "half.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="not UTF-16, as its beginning says"):
        read_chat(tmp_path / "half.jsonl")
    path = write(tmp_path / "one.jsonl", {"messages": talk("a", "b")})
    with pytest.raises(ValueError, match="has 1 conversations with an answer, of which 1 would be held out"):
        load_chat(path, TOKENIZER, held_out=0.5)
    with pytest.raises(ValueError, match="held_out is 1"):
        load_chat(path, TOKENIZER, held_out=1)


# --- loading a tokenizer ---


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    tokenizer(TURNS).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == TURNS
    assert loaded("é a")["input_ids"] == tokenizer()("é a")["input_ids"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[load_tokenizer\] .*none is not a folder, expected one that save_"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"^\[load_tokenizer\] .* has no tokenizer that can be loaded, expected its"):
        load_tokenizer(tmp_path)
