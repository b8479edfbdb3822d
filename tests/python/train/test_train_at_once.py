"""`roundpipe train --gradients-at-once`: the run is the same, in less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundpipe.train.config import TrainConfig
from roundpipe.train.session import run
from tiny_chat import chat_file, model_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def usual(tmp_path: Path) -> dict[str, Any]:
    model_folder(tmp_path / "model", num_hidden_layers=6)
    chat_file(tmp_path / "chat.jsonl", 60)
    return {
        "model": str(tmp_path / "model"),
        "data": [str(tmp_path / "chat.jsonl")],
        "length": 64,
        "steps": 4,
        "devices": "virtual:2",
        "samples": 0,
    }


def trained(out: Path, **options: Any) -> tuple[bytes, list[dict[str, Any]]]:
    assert run(TrainConfig(**options, out=str(out)), resume=False) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return (out / "model" / "model.safetensors").read_bytes(), records


def test_a_run_has_the_bits_of_one_whose_gradients_wait(usual: dict[str, Any], tmp_path: Path) -> None:
    plain, plain_records = trained(tmp_path / "plain", **usual, clip=0.0)
    at_once, records = trained(tmp_path / "at once", **usual, clip=0.0, gradients_at_once=True)
    assert at_once == plain
    norms = [[record["grad_norm"] for record in each if "grad_norm" in record] for each in (plain_records, records)]
    assert norms[0] == norms[1] and len(norms[0]) == 4


def test_clipping_by_the_last_norm_is_another_run(usual: dict[str, Any], tmp_path: Path) -> None:
    by_last, _ = trained(tmp_path / "last", **usual, clip=0.1, clip_by="last_norm", gradients_at_once=True)
    exact, _ = trained(tmp_path / "exact", **usual, clip=0.1)
    assert by_last != exact


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip_by": "last_norm"}, "--clip-by is last_norm, expected norm, or --gradients-at-once with it"),
        ({"gradients_at_once": True}, "expected --clip-by last_norm or --clip 0 with it"),
        ({"gradients_at_once": True, "clip": 0.0, "asynchronous": True}, "expected it without --asynchronous"),
    ],
)
def test_options_that_do_not_belong_together(
    options: dict[str, Any], expected: str, usual: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=expected):
        TrainConfig(**usual, out=str(tmp_path / "run"), **options)
