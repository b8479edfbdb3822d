"""`roundpipe train --gradients-at-once`: the run is the same, in less memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from interrupted_output import InterruptedAt
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


def trained(out: Path, resume: bool = False, **options: Any) -> tuple[bytes, list[dict[str, Any]]]:
    assert run(TrainConfig(**options, out=str(out)), resume=resume) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    written = next(path for path in out.glob("*/*.safetensors") if path.parent.name in ("model", "adapter"))
    return written.read_bytes(), records


def test_a_run_has_the_bits_of_one_whose_gradients_wait(usual: dict[str, Any], tmp_path: Path) -> None:
    plain, plain_records = trained(tmp_path / "plain", **usual, clip=0.0)
    at_once, records = trained(tmp_path / "at once", **usual, clip=0.0, gradients_at_once=True)
    assert at_once == plain
    norms = [[record["grad_norm"] for record in each if "grad_norm" in record] for each in (plain_records, records)]
    assert norms[0] == norms[1] and len(norms[0]) == 4


def test_two_passes_are_a_run_that_clips_by_the_norm(usual: dict[str, Any], tmp_path: Path) -> None:
    drawing = {**usual, "lora": True, "lora_dropout": 0.3, "clip": 0.01}
    plain, plain_records = trained(tmp_path / "plain", **drawing)
    passes, records = trained(tmp_path / "passes", **drawing, clip_by="two_passes", gradients_at_once=True)
    assert passes == plain
    kept = [
        [{name: record.get(name) for name in ("step", "loss", "grad_norm", "tokens")} for record in each]
        for each in (plain_records, records)
    ]
    assert kept[0] == kept[1] and all(record["grad_norm"] > 0.01 for record in records if "grad_norm" in record)


def test_two_passes_go_on_with_a_run_that_clipped_in_one(
    usual: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = trained(tmp_path / "whole", **usual, clip=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/"))
        assert run(TrainConfig(**usual, out=str(tmp_path / "parts"), clip=0.1), resume=False) == 130
    passes = {"clip_by": "two_passes", "gradients_at_once": True}
    parts, _ = trained(tmp_path / "parts", resume=True, **usual, clip=0.1, **passes)
    assert parts == whole


def test_clipping_by_the_last_norm_is_another_run(usual: dict[str, Any], tmp_path: Path) -> None:
    by_last, _ = trained(tmp_path / "last", **usual, clip=0.1, clip_by="last_norm", gradients_at_once=True)
    exact, _ = trained(tmp_path / "exact", **usual, clip=0.1)
    assert by_last != exact


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip_by": "last_norm"}, "--clip-by is last_norm, expected norm, or --gradients-at-once with it"),
        ({"gradients_at_once": True}, "expected --clip-by last_norm, --clip-by two_passes or --clip 0 with it"),
        ({"clip_by": "two_passes"}, "--clip-by is two_passes, expected norm, or --gradients-at-once with it"),
        ({"clip_by": "two_passes", "gradients_at_once": True, "clip": 0.0}, "which has no use for two passes"),
        ({"gradients_at_once": True, "clip": 0.0, "asynchronous": True}, "expected it without --asynchronous"),
    ],
)
def test_options_that_do_not_belong_together(
    options: dict[str, Any], expected: str, usual: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=expected):
        TrainConfig(**usual, out=str(tmp_path / "run"), **options)
