"""From sources to samples on disk: all of it, by the call that programs use."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors

import roundpipe
from process_memory import report_of
from roundpipe.data.batches import Batches
from roundpipe.data.conversations.encoder import SPLIT
from roundpipe.data.records import extra
from roundpipe.data.records.prepare import DataOptions, DataSummary, PreparedData, Progress, prepare
from roundpipe.data.samples import IGNORED
from tiny_chat import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def made(given: Any, folder: Path, **options: Any) -> PreparedData:
    return prepare(given if isinstance(given, list) else [given], TOKENIZER, DataOptions(**options), folder)


def texts(data: Any) -> list[str]:
    return [TOKENIZER.decode(sample["input_ids"]) for sample in data]


def same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in ("input_ids", "labels")
    )


# -- samples ----------------------------------------------------------------------------------------------------------


def test_conversations(tmp_path: Path) -> None:
    data = made(write(tmp_path / "a.jsonl", talk("q", "answer"), talk("p", "x")), tmp_path / "out", max_length=64)
    assert texts(data.train)[0] == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n"
    sample = data.train[0]
    learnt = sample["labels"] != IGNORED
    assert torch.equal(sample["labels"][learnt], sample["input_ids"][learnt])
    assert TOKENIZER.decode(sample["input_ids"][learnt]) == "answer<|im_end|>\n"
    assert data.summary.counted == len("answer") + 2 + len("x") + 2
    assert data.summary.examples[0].pieces[1] == ("answer<|im_end|>\n", True)
    everything = made(tmp_path / "a.jsonl", tmp_path / "all", max_length=64, train_on="all")
    assert torch.equal(everything.train[0]["labels"], sample["input_ids"])


def test_texts_are_cut_without_a_loss(tmp_path: Path) -> None:
    text = "0123456789" * 5
    (tmp_path / "a.txt").write_text(text)
    data = made(tmp_path / "a.txt", tmp_path / "out", max_length=8)
    rows = [sample["input_ids"].tolist() for sample in data.train]
    assert max(map(len, rows)) == 8 and all(len(row) > 1 for row in rows)
    assert [row[-1] for row in rows[:-1]] == [row[0] for row in rows[1:]]  # so that each token is predicted once
    assert rows[0] + [token for row in rows[1:] for token in row[1:]] == [*TOKENIZER(text)["input_ids"], END]
    assert data.summary.sources[0].overlong.reasons == {"cut into several samples": 1}
    assert data.summary.counted == len(text)
    lines = made(
        write(tmp_path / "b.txt", "one", "two"), tmp_path / "lines", max_length=8, documents="line", ends=False
    )
    assert texts(lines.train) == ["one", "two"]


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 20)
    data = made(tmp_path / "a.txt", tmp_path / "out", max_length=21, held_out=0.2)
    assert (len(data.train), len(data.held_out)) == (8, 2) and "the last 2 held out" in str(data.summary)
    assert texts(data.held_out)[-1].endswith("9<eos>")
    again = made(tmp_path / "a.txt", tmp_path / "out", max_length=21, held_out=0.2)
    assert again.reused and same(again.held_out, data.held_out) and same(again.train, data.train)
    with pytest.raises(ValueError, match="1 of 1 records would be held out"):
        made(tmp_path / "a.txt", tmp_path / "one", max_length=512, held_out=0.2)


def test_a_shape_that_is_not_known_names_what_to_type(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "--fields prompt=Q --fields completion=A": {"Q": "q", "A": "a", "id": 3},
        "--fields text=body": {"body": "t"},
        "--fields messages=dialog": {"dialog": [{"role": "user", "content": "q"}], "name": "x"},
        "--fields 'text=the text'": {"the text": "t"},
        "--fields prompt=MEMBER": {"a": 1},
    }
    for line, record in shapes.items():
        path = write(tmp_path / "a.jsonl", record)
        with pytest.raises(ValueError, match=f"say what they are, such as {line}"):
            made(path, tmp_path / "out", max_length=64)
    path = write(tmp_path / "a.jsonl", shapes["--fields prompt=Q --fields completion=A"])
    data = made(path, tmp_path / "out", max_length=64, fields=("prompt=Q", "completion=A"))
    assert texts(data.train) == ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"]


def test_fields_come_before_other_names_and_unused_ones_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"Q": "q", "question": "another", "answer": "a"})
    data = made(path, tmp_path / "out", max_length=64, fields=("prompt=Q", "system=rules"))
    assert texts(data.train) == ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"]
    assert data.summary.sources[0].notes.reasons == {"fields: no record has the member rules for system": 1}


ODD = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(),
    st.text("ab \n", max_size=4),
    st.just("x" * 700),
    st.lists(st.text("ab", max_size=2), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2),
)
WORDS = st.text("abc", min_size=1, max_size=5)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "function", "bot"]), "content": WORDS | ODD},
    optional={"weight": st.sampled_from([0, 1, 2]), "name": WORDS, "function_call": ODD},
)
SHAPES: dict[str, Any] = {
    "messages": {"messages": st.lists(TURNS, max_size=4) | ODD},
    "sharegpt": {
        "conversations": st.lists(
            st.fixed_dictionaries(
                {"from": st.sampled_from(["human", "gpt", "observation", "x"]), "value": WORDS | ODD}
            ),
            max_size=3,
        )
    },
    "prompt": {"prompt": WORDS | ODD, "completion": WORDS | ODD},
    "question": {"question": WORDS | ODD, "answer": WORDS | ODD},
    "instruction": {"instruction": WORDS | ODD, "output": WORDS | ODD},
    "dolly": {"instruction": WORDS | ODD, "response": WORDS | ODD},
    "text": {"text": WORDS | ODD},
}
MORE = {"system": WORDS | ODD, "input": WORDS | ODD, "context": ODD, "tools": ODD, "id": ODD}


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_odd_records_are_learnt_as_they_render_or_counted(
    shape: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = st.fixed_dictionaries(SHAPES[shape], optional=MORE)
    odd = data.draw(st.lists(record, min_size=1, max_size=8))
    form = {"question": "prompt", "dolly": "instruction"}.get(shape, shape)
    folder = tmp_path_factory.mktemp("odd")
    known = {
        "messages": talk("q", "a"),
        "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    }
    good = known.get(shape, dict.fromkeys(SHAPES[shape], "a"))
    path = write(folder / "a.jsonl", good, *odd)
    found = made(path, folder / "out", max_length=512, format=form, overlong="drop")
    (source,) = found.summary.sources
    counted = sum(sum(getattr(source, kind).reasons.values()) for kind in ("broken", "empty"))
    left_out = sum(count for reason, count in source.overlong.reasons.items() if reason.startswith("left out"))
    assert source.read == len(odd) + 1 == source.used + counted + left_out
    places = [place for kind in ("broken", "empty") for each in getattr(source, kind).places.values() for place in each]
    places += [
        place for reason, each in source.overlong.places.items() if reason.startswith("left out") for place in each
    ]
    assert all(place.startswith(str(path)) for place in places)
    lost = {int(place.removeprefix(f"{path}:").split(" ")[0]) for place in places}
    rendered = iter(texts(found.train))
    for line, each in enumerate([good, *odd], start=1):
        if line in lost:
            continue
        text = next(rendered)
        assert all(words in text for words in spoken(each)), (each, text)


def test_a_text_beside_messages_is_noted(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": "a"}
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    pair = {"chosen": "a", "rejected": "b"}
    for form, record, is_left_out in (
        ("messages", {"messages": [*asked, answer]}, True),
        ("messages", {"messages": [{"role": "user", "content": "below, q"}, answer]}, False),
        ("sharegpt", {"conversations": turns}, True),
        ("prompt", {"prompt": asked, "completion": "a"}, True),
        ("prompt", {"prompt": "q", "completion": [answer]}, False),
        ("instruction", {"instruction": "q", "output": "a"}, False),
        ("preference", {"prompt": asked, **pair}, True),
        ("preference", {"prompt": json.dumps(asked), **pair}, True),
        ("preference", {"prompt": "q", **pair}, False),
        ("rated", {"messages": [*asked, answer], "label": True}, True),
        ("rated", {"prompt": "q", "completion": "a", "label": True}, False),
        ("text", {"text": "t"}, False),
    ):
        for more in ({}, {"context": " "}, {"input": "below"}, {"context": "below"}):
            path = write(tmp_path / "a.jsonl", {**record, **more})
            data = made(path, tmp_path / "out", max_length=64, format=form)
            notes = data.summary.sources[0].notes.reasons
            noted = "input or context beside messages: left out, expected it in a message"
            assert notes == ({noted: 1} if is_left_out and "below" in more.values() else {}), (form, record, more)


def spoken(record: dict[str, Any]) -> list[str]:
    """All texts of a record that a model is to see."""
    turns = record.get("messages") or record.get("conversations") or []
    found = [each for turn in turns for each in (turn.get("content"), turn.get("value"))]
    found += [record.get(name) for name in ("prompt", "completion", "question", "answer", "output", "response", "text")]
    found += [record.get("instruction"), None if "text" in record else record.get("system")]
    beside_messages = turns or isinstance(record.get("prompt"), list)
    found += [record.get(name) for name in ("input", "context") if not beside_messages and "text" not in record]
    return [each for each in found if isinstance(each, str) and each.strip()]


def test_a_long_text_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}\n" for number in range(30))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("end\n")
    whole = made([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "whole", max_length=512)
    monkeypatch.setattr("roundpipe.data.records.reading._PIECE_CHARACTERS", 20)
    data = made([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", max_length=512, held_out=1)
    assert data.summary.records == 2 and data.summary.tokens == whole.summary.tokens
    assert "".join(texts([*data.train, *data.held_out])).replace("end\n<eos>", "") == text + "<eos>"
    assert len(data.held_out) in (1, data.summary.samples - 1)  # a record is held out with all of its samples
    dropped = made([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "drop", max_length=512, overlong="drop")
    assert texts(dropped.train) == ["end\n<eos>"]
    assert dropped.summary.sources[0].overlong.places == {"left out": [str(tmp_path / "a.txt")]}


def test_pairs(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    data = made(write(tmp_path / "a.jsonl", pair, pair, pair), tmp_path / "out", max_length=64, held_out=1)
    assert data.summary.pairs and (data.summary.samples, len(data.train), len(data.held_out)) == (3, 2, 1)
    for name, answer in (("chosen", "good"), ("rejected", "bad")):
        sample = data.train[0][name]
        assert TOKENIZER.decode(sample["labels"][sample["labels"] != IGNORED]) == f"{answer}<|im_end|>\n"
    assert data.train.lengths(np.array([0]))[0] == sum(
        len(data.train[0][name]["input_ids"]) for name in pair if name != "prompt"
    )
    with pytest.raises(ValueError, match=r"a\.txt is no preference pair, and records before it are pairs"):
        made([tmp_path / "a.jsonl", write(tmp_path / "a.txt", "text")], tmp_path / "mixed", max_length=64)


REWRITING = (  # as templates that keep thoughts only in the last answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_a_template_rewrites_is_said(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = REWRITING
    long = talk("q", "<think>x</think>a")["messages"] + talk("p", "b")["messages"]
    path = write(tmp_path / "a.jsonl", {"messages": long}, talk("q", "a"))
    data = prepare([path], tokenizer, DataOptions(max_length=128), tmp_path / "out")
    assert (data.summary.records, data.summary.samples) == (2, 3)
    assert data.summary.sources[0].notes.places == {SPLIT: [f"{path}:1"]}
    assert f"notes: 1: {SPLIT}" in str(data.summary)
    other = [*long[:-1], {"role": "assistant", "content": "c"}]
    first, last = {"chosen": [*long[:1], *long[1:]], "rejected": [long[0], *other[1:]]}, talk("q", "a")["messages"]
    first["chosen"][1] = {"role": "assistant", "content": "<think>y</think>a"}
    pair = {"chosen": last, "rejected": [last[0], {"role": "assistant", "content": "b"}]}
    pairs = prepare(
        [write(tmp_path / "b.jsonl", first, pair)], tokenizer, DataOptions(max_length=128), tmp_path / "pairs"
    )
    assert list(pairs.summary.sources[0].broken.reasons) == ["a pair whose answers the chat template rewrites"]
    assert len(pairs.train) == 1


def test_a_pair_is_left_out_as_a_whole(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad " * 40}
    for overlong, reason, left in (("drop", "left out", 1), ("cut", "lost its end", 2)):
        path = write(tmp_path / "a.jsonl", pair, {**pair, "rejected": "bad"})
        data = made(path, tmp_path / overlong, max_length=64, overlong=overlong)
        assert data.summary.sources[0].overlong.reasons == {reason: 1} and len(data.train) == left


def test_tokens_that_a_tokenizer_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(bos_token="<|im_start|>", unk_token="<pad>")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <eos>", special_tokens=[("<|im_start|>", begin), ("<eos>", end)]
    )
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n<pad>")
    expected = [begin, *tokenizer("one\ntwo\nthree\n<pad>", add_special_tokens=False)["input_ids"], end]
    for pieces in (1 << 20, 2):
        monkeypatch.setattr("roundpipe.data.records.reading._PIECE_CHARACTERS", pieces)
        data = prepare([tmp_path / "a.txt"], tokenizer, DataOptions(max_length=64), tmp_path / f"{pieces}")
        assert [token for sample in data.train for token in sample["input_ids"].tolist()] == expected
        assert (data.summary.unknown, data.summary.records) == (1, 1)


def test_a_long_text_whose_first_piece_has_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    monkeypatch.setattr("roundpipe.data.records.reading._PIECE_CHARACTERS", 1)
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("\n\nsecond\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    data = prepare(files, tokenizer, DataOptions(max_length=64, held_out=1), tmp_path / "out")
    assert data.summary.records == 2 and len(data.train) == len(data.held_out) == 1


def test_tokens(tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}, {"input_ids": [4, 999]}, {"input_ids": [4, 5]}]
    data = made(
        write(tmp_path / "a.jsonl", *records, {"input_ids": [1], "labels": [1]}), tmp_path / "out", max_length=8
    )
    assert [sample["labels"].tolist() for sample in data.train] == [[-100, 2, -100], [4, 5]]
    (source,) = data.summary.sources
    assert source.broken.places == {
        "tokens outside of the vocabulary": [f"{tmp_path / 'a.jsonl'}:2 (4 to 999, expected 0 to {len(TOKENIZER) - 1})"]
    }
    assert list(source.empty.reasons) == ["no token that counts"]


# -- what cannot be used ----------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_counted_and_named(tmp_path: Path) -> None:
    bad = ["{", "[]", {"text": "x"}, talk("q", "a"), {"messages": []}, {"messages": talk("q", "a")["messages"][:1]}]
    path = write(tmp_path / "a.jsonl", *bad, talk("q", "long " * 20), talk("long " * 20, "a"))
    data = made(path, tmp_path / "out", max_length=64)
    (source,) = data.summary.sources
    assert (source.read, source.used, data.summary.records) == (8, 2, 2)
    assert source.broken.places == {
        "not JSON": [f"{path}:1"],
        "no object": [f"{path}:2 (is a list, expected an object with members)"],
        "a record without messages": [f"{path}:3 (has the members text; say which it is by --fields messages=MEMBER)"],
    }
    assert source.empty.reasons == {"no messages": 1, "no answer of the assistant": 1}
    assert source.overlong.places == {
        "lost its end": [f"{path}:7"],
        "left out: nothing that counts is left before its end": [f"{path}:8"],
    }
    shown = str(data.summary)
    assert f"1: not JSON ({path}:1)" in shown and "2 used" in shown
    assert len(list(data.summary.problems)) == 3 + 2 + 2
    assert DataSummary.from_json(json.loads(json.dumps(data.summary.as_json()))) == data.summary


def test_all_are_counted_and_the_first_hundred_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk("q", "a"), *["{"] * 150)
    (source,) = made(path, tmp_path / "out", max_length=64).summary.sources
    assert source.broken.reasons["not JSON"] == 150
    assert source.broken.places["not JSON"] == [f"{path}:{line}" for line in range(2, 102)]


def test_options_end_a_preparation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk("q", "a"), "{", talk("q", ""), talk("q", "long " * 20))
    for options, message in (
        ({"on_bad": "error"}, r"a\.jsonl:2: not JSON; mend"),
        ({"overlong": "error"}, r"a\.jsonl:4: left out; mend"),
    ):
        with pytest.raises(ValueError, match=message):
            made(path, tmp_path / "out", max_length=64, **options)
        assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1
    dropped = made(path, tmp_path / "out", max_length=64, overlong="drop")
    assert dropped.summary.sources[0].overlong.places == {"left out": [f"{path}:4"]}


def test_nothing_usable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{", {"body": "x"})
    with pytest.raises(ValueError, match=r"(?s)nothing usable is left.*broken: 1: not JSON \(.*a\.jsonl:1\)"):
        made(path, tmp_path / "out", max_length=64)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length is 1"),
        ({"format": "chat"}, "format is 'chat', expected auto, text"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"held_out": -1}, "held_out is -1"),
        ({"fields": ("prompt",)}, "fields has 'prompt', expected NAME=MEMBER"),
        ({"overlong": "x"}, "overlong is 'x', expected cut, drop, error"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[data\] {message}"):
        DataOptions(**{"max_length": 8, **options})


# -- sources ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_everything(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    table = datasets.Dataset.from_list([{"text": "parquet"}])
    table.to_parquet(folder / "deep" / "e.parquet")
    write(folder / "a.jsonl", {"text": "lines"})
    (folder / "b.json").write_text('[{"text": "json"}]')
    (folder / "c.csv").write_text("text,more\ncsv,1\n")
    (folder / "f.txt").write_text("text")
    (folder / "README.md").write_text("no data")
    data = made(folder, tmp_path / "out", max_length=64, ends=False)
    assert texts(data.train) == ["lines", "json", "csv", "parquet", "text"]
    assert data.summary.sources[0].notes.places == {"not a file of data": [str(folder / "README.md")]}


def test_data_sets(tmp_path: Path) -> None:
    rows = [talk("q", "a"), {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]}]
    table = datasets.Dataset.from_list(rows)
    data = made([table], tmp_path / "object", max_length=64)
    assert data.summary.sources[0].name == "Dataset" and data.summary.records == 2
    assert made([table], tmp_path / "object", max_length=64).reused
    stream = made([(table.to_iterable_dataset(), 0.5)], tmp_path / "stream", max_length=64)
    assert same(stream.train, data.train) and len(stream.train.order(0, None)) == 1
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "saved")
    assert same(made(tmp_path / "saved", tmp_path / "from_saved", max_length=64).train, data.train)
    listed = made([rows], tmp_path / "list", max_length=64)
    assert same(listed.train, data.train) and not made([rows], tmp_path / "list", max_length=64).reused


def test_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", {"text": "train"})
    write(tmp_path / "data" / "test.jsonl", {"text": "test"})
    splits = {name: datasets.Dataset.from_list([{"text": f"saved {name}"}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    given = [f"{tmp_path}/data:test", f"{tmp_path}/data:default:train=2", f"{tmp_path}/saved:test"]
    data = made(given, tmp_path / "out", max_length=64, ends=False)
    assert texts(data.train) == ["test", "train", "saved test"] and len(data.train.order(0, 0)) == 4
    assert made(given, tmp_path / "out", max_length=64, ends=False).reused
    with pytest.raises(ValueError, match="saved:none is not there, expected one of its splits: train, test"):
        made(f"{tmp_path}/saved:none", tmp_path / "out", max_length=64)


def test_the_members_of_records_may_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})
    data = made(path, tmp_path / "out", max_length=64, fields=("prompt=question", "completion=answer"))
    assert data.summary.sources[0].format == "prompt" and len(data.train) == 1


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", talk("q", "a"))
    (tmp_path / "none").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").touch()
    for source, message in (
        ("x.jsonl", "x.jsonl is not there"),
        (f"{tmp_path}/x", "is not there"),
        (tmp_path / "none", "has no files"),
        (tmp_path / "docs", "has no files of data"),
        (f"{tmp_path}/a.jsonl=0", "has the weight '0', expected a number above 0"),
        (f"{tmp_path}/a.jsonl=x", "has the weight 'x'"),
        (3, "a source is a int"),
        ("a:b:c:d", "names no data set"),
    ):
        with pytest.raises(ValueError, match=rf"^\[data\] .*{message}"):
            made([source], tmp_path / "out", max_length=64)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("owner/name-2.5", "owner/name:test", "owner/name:part:test"):
        with pytest.raises(ValueError, match=rf"^\[data\] datasets cannot load {name}: "):
            made(name, tmp_path / "out", max_length=64)
    with pytest.raises(ValueError, match="expected a list of at least one source"):
        prepare("a.jsonl", TOKENIZER, DataOptions(max_length=64), tmp_path / "out")


def test_no_record_is_in_two_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data" / "a.jsonl", talk("q", "a"), talk("q", "b"))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    table = datasets.Dataset.from_list([talk("q", "a"), talk("q", "b")])
    table.save_to_disk(tmp_path / "saved")
    records = [talk("q", "a")]
    for sources, twice in (
        ([path, f"{path}=0.5"], f"{path} is given twice"),
        ([path, "data/../data/a.jsonl"], f"{path} and data/../data/a.jsonl are the same"),
        ([path, link], f"{path} and {link} are the same"),
        (["data", path], f"data/a.jsonl and {path} are the same"),
        ([table, (table, 2)], "Dataset is given twice"),
        (["saved", f"{tmp_path}/saved"], f"saved and {tmp_path}/saved are the same"),
        ([records, records], "list is given twice"),
    ):
        with pytest.raises(ValueError, match=rf"^\[data\] {re.escape(twice)}, expected it once.* give .* a weight"):
            made(sources, tmp_path / "out", max_length=64)
    (tmp_path / "data" / "b.jsonl").symlink_to("a.jsonl")
    with pytest.raises(ValueError, match=r"data/a\.jsonl and data/b\.jsonl are the same"):
        made("data", tmp_path / "out", max_length=64)
    other = write(tmp_path / "other.jsonl", talk("q", "a"), talk("q", "b"))  # no other way to the same file
    assert made([path, other, list(records), records], tmp_path / "out", max_length=64).summary.records == 6


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no_such_package cannot be imported .* pip install 'roundpipe-engine\[data\]'"
    ):
        extra.imported("no_such_package.part", "to read x")


# -- once, whole, the same --------------------------------------------------------------------------------------------


def test_what_is_prepared_is_not_prepared_again(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.jsonl", talk("q", "a"), talk("q", "b")), tmp_path / "out"
    first = made(path, out, max_length=64, held_out=1)
    again = made(path, out, max_length=64, held_out=1)
    assert (first.reused, again.reused) == (False, True) and again.summary == first.summary
    assert same(again.train, first.train) and again.train.identity == first.train.identity
    assert not made(path, out, max_length=63, held_out=1).reused
    other = byte_tokenizer()
    other.chat_template = "{# another #}" + TOKENIZER.chat_template
    assert not prepare([path], other, DataOptions(max_length=63, held_out=1), out).reused
    made(path, out, max_length=63)
    os.utime(path, ns=(1, 1))
    assert not made(path, out, max_length=63).reused
    (out / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"^\[data\] .*out is not empty"):
        made(path, out, max_length=62)
    assert (out / "mine.txt").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.jsonl", talk("q", "a"), talk("q", "b")), tmp_path / "out"
    made(path, out, max_length=64)
    for name in ("samples.tokens", "samples.runs", "records.first"):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(whole[:-8])
        with pytest.raises((ValueError, roundpipe.RoundPipeError), match=r"(make or copy it|prepare the data) again"):
            made(path, out, max_length=64)
        (out / name).write_bytes(whole)
    assert made(path, out, max_length=64).reused


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk("q", "a"))

    def interrupt(progress: Progress) -> None:
        assert (progress.read, progress.samples) == (1, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([path], TOKENIZER, DataOptions(max_length=64), tmp_path / "out", interrupt)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_held_out_records_are_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(talk("q", f"answer {number}") for number in range(40)))
    runs = [
        made(path, tmp_path / f"{run}", max_length=64, held_out=0.2, seed=seed) for run, seed in enumerate((0, 0, 1))
    ]
    assert same(runs[0].held_out, runs[1].held_out) and not same(runs[0].held_out, runs[2].held_out)
    assert len(runs[0].held_out) == 8 == runs[0].summary.held_out_records
    assert sorted(texts([*runs[0].train, *runs[0].held_out])) == sorted(
        texts(made(path, tmp_path / "x", max_length=64).train)
    )
    places = [int(text.split("answer ")[1].split("<")[0]) for text in texts(runs[0].held_out)]
    assert min(places) < 20 <= max(places)


# -- batches ----------------------------------------------------------------------------------------------------------


def batches_of(data: PreparedData, **more: Any) -> Batches:
    options = {"batch_tokens": 128, "max_length": 64, "pad_token_id": 0, "epochs": 3, "seed": 5, **more}
    return Batches(data.train, **options)


def test_batches_of_weighted_sources_go_on_where_they_were(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *(talk("q", f"{number:03}") for number in range(30)))
    second = write(tmp_path / "b.jsonl", *(talk("q", f"{number:03}") for number in range(500, 510)))
    data = made([f"{first}=0.5", f"{second}=2"], tmp_path / "out", max_length=64)
    whole = list(batches_of(data))
    assert len(whole) == len(batches_of(data))
    assert all(batch["input_ids"].shape[1] <= 64 and batch["input_ids"].numel() <= 128 * 2 for batch in whole)
    shown = "".join(TOKENIZER.decode(batch["input_ids"].flatten()) for batch in whole)
    counts = [shown.count(f"\n{number:03}<") for number in (*range(30), *range(500, 510))]
    assert sum(counts[:30]) == 45 and set(counts[:30]) == {1, 2} and set(counts[30:]) == {6}
    going = iter(running := batches_of(data))
    begun = [next(going) for _ in range(4)]
    resumed = batches_of(data)
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    for batch, expected in zip([*begun, *resumed], whole, strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    other = made([f"{first}=0.5", f"{second}=3"], tmp_path / "other", max_length=64)
    with pytest.raises(ValueError, match="the position was saved for other batches"):
        batches_of(other).load_state_dict(running.state_dict())
    with pytest.raises(ValueError, match=r"have up to \d+ tokens, expected at most max_length = 16"):
        batches_of(data, max_length=16)


@pytest.mark.long
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    record = json.dumps({"text": "some words of a text " * 400}) + "\n"  # 8.4 kB
    (tmp_path / "first.jsonl").write_text(record * 130)
    (tmp_path / "all.jsonl").write_text(record * 6000)
    report = report_of("prepare_memory_program.py", tmp_path)
    assert report["tokens"] > 50e6
    assert report["rose"] < 32e6  # the file has 50 MB, its tokens 100 MB on disk, and as lists 400 MB
