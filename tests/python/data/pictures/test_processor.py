"""Pictures among tokens: what is learnt of texts with pictures, batches, and pictures that cannot be used."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from roundpipe.data.pictures.batches import PICTURED, PictureBatches
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.records.prepare import DataOptions, PreparedData, prepare
from roundpipe.data.samples import IGNORED
from tiny_pictures import drawn, gemma, llava, shape_file

MAKERS = {"llava": llava, "gemma": gemma}


@pytest.fixture(scope="module", params=list(MAKERS))
def pictures(request: Any) -> PictureProcessor:
    return PictureProcessor(MAKERS[request.param]()[1])


def prepared(pictures: PictureProcessor, data: Path, out: Path, **options: Any) -> PreparedData:
    settings = DataOptions(**{"max_length": 256, **options})
    return prepare([str(data)], pictures.tokenizer, settings, out, pictures=pictures)


def learnt(pictures: PictureProcessor, sample: Any) -> str:
    return str(pictures.tokenizer.decode(sample["input_ids"][sample["labels"] != IGNORED]))


def test_answers_are_learnt_and_tokens_are_the_processors(pictures: PictureProcessor, tmp_path: Path) -> None:
    data = prepared(pictures, shape_file(tmp_path / "data", 9, uneven=True), tmp_path / "out")
    answers = [json.loads(line)["messages"][1]["content"] for line in (tmp_path / "data/shapes.jsonl").open()]
    assert [learnt(pictures, sample).removesuffix("\n") for sample in data.train] == [f"{a}<|im_end|>" for a in answers]
    assert [len(sample["pictures"]) for sample in data.train] == [1, 2, 0] * 3
    assert data.summary.pictures == 6 and "6 with pictures" in str(data.summary)
    for sample in data.train:
        read = [Image.open(each.place) for each in sample["pictures"]]
        made = pictures.processor(text=sample["text"], images=read or None, add_special_tokens=False)
        assert sample["input_ids"].tolist() == made["input_ids"][0]


def test_several_turns_with_pictures(pictures: PictureProcessor, tmp_path: Path) -> None:
    drawn("square", "red", 1).save(tmp_path / "a.png")
    drawn("circle", "blue", 2).save(tmp_path / "b.png")
    part = {"type": "image", "path": "a.png"}
    said = [
        {"role": "user", "content": [part, {"type": "text", "text": "one?"}]},
        {"role": "assistant", "content": "one."},
        {"role": "user", "content": [{"type": "text", "text": "two?"}, {**part, "path": str(tmp_path / "b.png")}]},
        {"role": "assistant", "content": "two."},
    ]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (sample,) = prepared(pictures, tmp_path / "x.jsonl", tmp_path / "out").train
    assert learnt(pictures, sample).replace("\n", "") == "one.<|im_end|>two.<|im_end|>"
    (whole,) = prepared(pictures, tmp_path / "x.jsonl", tmp_path / "all", train_on="all").train
    text = learnt(pictures, whole)
    assert "one?" in text and "<image" not in text.replace("<start_of_image>", "")


def test_a_batch_is_the_processors(pictures: PictureProcessor, tmp_path: Path) -> None:
    data = prepared(pictures, shape_file(tmp_path / "data", 6, uneven=True), tmp_path / "out")
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 256, "pad_token_id": pictures.tokenizer.pad_token_id}
    (rows,) = PictureBatches(data.train, pictures=pictures, **sizes)
    batch = rows[PICTURED](range(6))
    assert all(torch.equal(batch[name], rows[name]) for name in rows if name != PICTURED)
    assert batch["pixel_values"].shape[0] == 6
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    count = (batch["labels"] != IGNORED).sum(1).tolist()
    assert count == [int((sample["labels"] != IGNORED).sum()) for sample in data.train]
    drawn("square", "red", 1).resize((112, 56)).save(tmp_path / "data" / "0-0.png")
    other = rows[PICTURED]([0, 2])  # of the same tokens
    assert not torch.equal(other["pixel_values"], batch["pixel_values"][:1])
    assert "pixel_values" not in rows[PICTURED]([2])
    mask = rows["attention_mask"][[0, 2]]
    assert torch.equal(other["input_ids"], rows["input_ids"][[0, 2], : int(mask.sum(1).max())])


def test_pictures_in_every_form_and_broken_ones(pictures: PictureProcessor, tmp_path: Path) -> None:
    drawn("square", "red", 1).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "no.png").write_text("no picture")
    said = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}]
    good = [
        "a.png", tmp_path / "a.png", f"file://{tmp_path}/a.png", content, {"bytes": content, "path": None},
        {"path": str(tmp_path / "a.png")}, Image.open(tmp_path / "a.png"),
        Image.open(tmp_path / "a.png").convert("CMYK"),
        f"data:image/png;base64,{base64.b64encode(content).decode()}",
    ]  # fmt: skip
    bad = ["half.png", "no.png", "missing.png", "https://example.org/a.png", 3, b"x"]
    records = [{"messages": said, "images": [picture]} for picture in [*good, *bad]]
    for record in records:
        if record["images"][0] in ("a.png", "half.png", "no.png", "missing.png"):
            record["images"] = [str(tmp_path / str(record["images"][0]))]
    data = prepare([records], pictures.tokenizer, DataOptions(max_length=128), tmp_path / "out", pictures=pictures)
    assert len(data.train) == len(good)
    assert {sample["input_ids"].shape for sample in data.train} == {data.train[0]["input_ids"].shape}
    assert all(Path(sample["pictures"][0].place).is_file() for sample in data.train)
    broken = data.summary.sources[0].broken.reasons
    assert broken == {
        "a picture that cannot be read": 4,
        "a picture that is not there": 1,
        "a picture by its address on a network": 1,
    }


def test_conversations_in_other_forms(pictures: PictureProcessor, tmp_path: Path) -> None:
    drawn("square", "red", 1).save(tmp_path / "a.png")
    image = str(tmp_path / "a.png")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    answered = [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
    written = "<image>what?"
    forms: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": written}, {"role": "assistant", "content": "red"}]},
        {"prompt": written, "completion": "red"},
        {"prompt": asked, "completion": answered},
        {"prompt": "what?", "completion": "red"},
        {"instruction": written, "output": "red"},
        {"conversations": [{"from": "human", "value": written}, {"from": "gpt", "value": "red"}]},
    ]
    found = []
    for number, form in enumerate(forms):
        data = prepare(
            [[{**form, "images": [image]}]],
            pictures.tokenizer,
            DataOptions(max_length=128),
            tmp_path / f"out{number}",
            pictures=pictures,
        )
        found.append(data.train[0])
        assert found[-1]["pictures"] == [("image", image)]
    for sample in found:
        assert sample["text"] == found[0]["text"]
        assert torch.equal(sample["input_ids"], found[0]["input_ids"])
        assert torch.equal(sample["labels"], found[0]["labels"])


@pytest.mark.parametrize(
    ("record", "form", "reason"),
    [
        ({"text": "<image>red"}, "auto", "pictures beside a text"),
        ({"prompt": "<image>?", "chosen": "red", "rejected": "blue"}, "auto", "pictures where answers are compared"),
        ({"prompt": "<image>?", "completion": "red", "label": True}, "rated", "pictures where answers are compared"),
    ],
)
def test_pictures_where_none_can_be_learnt_from(
    record: dict[str, Any], form: Any, reason: str, pictures: PictureProcessor, tmp_path: Path
) -> None:
    drawn("square", "red", 1).save(tmp_path / "a.png")
    options = DataOptions(max_length=128, format=form)
    with pytest.raises(ValueError, match=f"nothing usable is left(.|\n)*{reason}"):
        prepare(
            [[{**record, "images": [str(tmp_path / "a.png")]}]],
            pictures.tokenizer,
            options,
            tmp_path / "out",
            pictures=pictures,
        )


def test_a_template_that_marks_answers(tmp_path: Path) -> None:
    """Conversations without pictures take its marks, and are in one batch with others."""
    processor = PictureProcessor(llava()[1])
    template = processor.tokenizer.chat_template
    marked = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% el"
    processor.tokenizer.chat_template = template.replace("{% if m['content']", marked + "if m['content']", 1)
    data = prepared(processor, shape_file(tmp_path / "data", 3, uneven=True), tmp_path / "out")
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 256, "pad_token_id": processor.tokenizer.pad_token_id}
    (rows,) = PictureBatches(data.train, pictures=processor, **sizes)
    assert torch.equal(rows[PICTURED]([0, 1, 2])["input_ids"], rows["input_ids"])
    assert learnt(processor, data.train[2]) == "no"


def test_without_a_processor_pictures_are_counted(tmp_path: Path) -> None:
    tokenizer = llava()[1].tokenizer
    data = prepare(
        [str(shape_file(tmp_path / "data", 6, uneven=True))], tokenizer, DataOptions(max_length=99), tmp_path / "o"
    )
    assert len(data.train) == 2
    assert data.summary.sources[0].broken.reasons == {"pictures, which the model does not take": 4}


def test_long_rows_with_pictures_are_left_out(pictures: PictureProcessor, tmp_path: Path) -> None:
    data = prepared(pictures, shape_file(tmp_path / "data", 6, uneven=True), tmp_path / "out", max_length=60)
    assert sum(data.summary.sources[0].overlong.reasons.values()) > 0
    assert all(len(sample["input_ids"]) <= 60 for sample in data.train)
    assert "left out" in str(data.summary)


def test_the_token_of_a_picture_in_words_is_broken(pictures: PictureProcessor, tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "what is <start_of_image> or <image> ?"},
        {"role": "assistant", "content": "a tag"},
    ]
    shapes = shape_file(tmp_path / "data", 3)
    with shapes.open("a") as file:
        file.write(json.dumps({"messages": said}) + "\n")
        file.write(json.dumps({"text": "<image>", "images": ["0-0.png"]}) + "\n")
    data = prepared(pictures, shapes, tmp_path / "out")
    assert len(data.train) == 3
    assert data.summary.sources[0].broken.places.keys() == {
        "the model's token for a picture in a text",
        "a record without messages",
    }


def test_a_picture_that_is_gone_names_the_batch(pictures: PictureProcessor, tmp_path: Path) -> None:
    data = prepared(pictures, shape_file(tmp_path / "data", 3), tmp_path / "out")
    (tmp_path / "data" / "1-0.png").unlink()
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 256, "pad_token_id": pictures.tokenizer.pad_token_id}
    with pytest.raises(
        ValueError, match=r"a batch cannot be made: a picture that cannot be read: .*1-0\.png.* --resume"
    ):
        next(iter(PictureBatches(data.train, pictures=pictures, **sizes)))[PICTURED]([1])
