"""roundpipe-train with weights in float16: the loss scale, the steps that it costs, and when a run gives up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from metric_lines import repeatable_lines
from roundpipe import _core
from sweeps import mostly_long
from token_files import write_tokens

PROGRAM = Path(__file__).resolve().parents[3] / "build" / "release" / "programs" / "train" / "roundpipe-train"
pytestmark = [pytest.mark.skipif(not PROGRAM.exists(), reason="make build-tests has not made the program")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDPIPE_DEVICES": "virtual:2"}
VOCABULARY, LENGTH, STEPS = 50, 16, 8
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose heads' weights are multiplied: gradients behind the head grow by as much."""
    folder = tmp_path_factory.mktemp("float16")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, factor in (("quiet", 1.0), ("loud", 20.0), ("hopeless", 1e7)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    documents = [[(7 * row + 3 * place) % VOCABULARY for place in range(2 + row % 13)] for row in range(40)]
    write_tokens(folder / "some.tokens", documents, VOCABULARY)
    return folder


@pytest.fixture
def train(place: Path, tmp_path: Path) -> Train:
    def run(model: str = "loud", **options: Any) -> subprocess.CompletedProcess[str]:
        given = {"model": place / model, "tokens": place / "some.tokens", "out": tmp_path / "run", "length": LENGTH}
        given |= {
            "learning_rate": 0.01,
            "steps": STEPS,
            "dtype": "float16",
            "schedule": "constant",
            "batch_tokens": 4 * LENGTH,
        }
        words = [str(PROGRAM)]
        for name, value in (given | options).items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)

    return run


def test_a_run_scales_its_losses(train: Train, tmp_path: Path) -> None:
    done = train("quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = repeatable_lines(tmp_path / "run")
    assert [(line["loss_scale"], line["skipped_steps"]) for line in lines] == [(65536, 0)] * STEPS
    assert 3 < lines[0]["loss"] < 5, "the loss of guessing is ln 50"
    assert "tokens/s  scale 65536  skipped 0  " in done.stdout
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert trained.dtype == torch.float16
    assert train("quiet", dtype="float32", out=tmp_path / "other").returncode == 0
    assert "loss_scale" not in repeatable_lines(tmp_path / "other")[0]


@pytest.mark.parametrize(
    "more", mostly_long([{}, {"asynchronous": True, "lora": True, "lora_dropout": 0.2}], {}), ids=str
)
def test_a_run_goes_on_with_the_same_bits(more: dict[str, Any], train: Train, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    done = train(**more, save_every=1, keep=STEPS, out=whole)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [line["skipped_steps"] for line in repeatable_lines(whole)]
    assert 0 < skipped[1] <= skipped[-1] < STEPS
    for step in (1, STEPS - 2):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        shutil.copytree(whole / f"step-{step}", part / f"step-{step}")
        done = train(**more, save_every=1, out=part, resume=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert repeatable_lines(part) == repeatable_lines(whole)[step:]
        result = "adapter/adapter_model.safetensors" if more else "model/model.safetensors"
        expected = load_file(whole / result)
        assert all(torch.equal(value, expected[name]) for name, value in load_file(part / result).items())


def test_a_skipped_step_changes_nothing_and_halves_the_scale(train: Train, place: Path, tmp_path: Path) -> None:
    done = train(steps=1, weight_decay=0.1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert repeatable_lines(tmp_path / "run")[0]["skipped_steps"] == 1
    before = AutoModelForCausalLM.from_pretrained(place / "loud", dtype=torch.float16).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert train(steps=4, out=tmp_path / "longer").returncode == 0
    scales = [line["loss_scale"] for line in repeatable_lines(tmp_path / "longer")]
    assert scales[:2] == [65536, 32768]


def test_a_model_whose_values_do_not_fit_ends_the_run_as_in_python(train: Train, tmp_path: Path) -> None:
    done = train("hopeless", steps=40)
    assert done.returncode == 1
    steps = _core.SkippedSteps(16)
    with pytest.raises(_core.RoundPipeError) as error:
        steps.add(17, True, 1.0)
    assert str(error.value) in done.stderr
    lines = repeatable_lines(tmp_path / "run")
    assert [line["loss_scale"] for line in lines] == [2.0**n for n in range(16, 0, -1)]
    assert lines[-1]["skipped_steps"] == 16 and lines[-1]["loss"] is None
