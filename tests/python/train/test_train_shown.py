"""`roundpipe train --show`, and the sample that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app
from roundpipe.train.shown import marked
from tiny_chat import chat_file, model_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shown")
    model_folder(place / "model")
    chat_file(place / "chat.jsonl", 5)
    return place


def said(place: Path, *options: str) -> Any:
    words = ["train", "--model", str(place / "model"), "--data", str(place / "chat.jsonl"), "--length", "64", *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


SAMPLE = "<|im_start|>user\na 3<|im_end|>\n<|im_start|>assistant\n\u27e6aaa<|im_end|>\n\u27e7\n"


def test_samples_are_shown_with_what_is_learnt(place: Path) -> None:
    text = said(place, "--show", "2", "--held-out", "0")
    assert "5 records, 5 samples" in text
    assert f"sample 1 of 5, what is learnt between \u27e6 \u27e7:\n{SAMPLE}" in text
    assert "sample 2 of 5" in text and "sample 3" not in text
    assert text.count("\u27e6") == 4
    assert "sample 5 of 5" in said(place, "--show", "9", "--held-out", "0")


def test_a_run_begins_with_a_sample(place: Path, tmp_path: Path) -> None:
    text = said(place, "--out", str(tmp_path / "run"), "--steps", "1", "--devices", "virtual:1", "--samples", "0")
    first = f"a sample ({place / 'chat.jsonl'}:1), what is learnt is marked:\n{SAMPLE}"
    assert first in text and text.index(first) < text.index("step 1/1")


@pytest.mark.parametrize("space", ["", " "])
def test_tokens_of_a_picture_are_counted(space: str) -> None:
    repeated = space.join(["<image>"] * 16)
    assert marked([(f"a {repeated} b <i><i>", False)]) == "a <image> x 16 b <i><i>"
