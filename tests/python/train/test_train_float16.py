"""`roundpipe train` with weights in float16: the loss scale, the steps that it costs, and when a run gives up."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import roundpipe
from interrupted_output import InterruptedAt
from metric_lines import repeatable_lines
from roundpipe import _core
from roundpipe.data.balance import balanced_config
from roundpipe.model.call.loss_function import ScaledOutputs
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import read_data
from roundpipe.train.model import load_model
from roundpipe.train.nodes import RunNodes
from roundpipe.train.optimizer import make_optimizer, make_schedule
from roundpipe.train.session import run
from sweeps import mostly_long, sweep
from tiny_chat import byte_tokenizer, chat_file, tiny_llama

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 6


def folder_of(folder: Path, head_factor: float) -> Path:
    """A model whose head's weights are multiplied: gradients behind the head grow by as much."""
    model = tiny_llama(num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(head_factor)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16")
    folder_of(folder / "model", 1)
    folder_of(folder / "loud", 10)  # the first scales overflow, and lower ones do not
    folder_of(folder / "louder", 40)  # the same for adapters
    folder_of(folder / "hopeless", 1e6)  # its logits are inf in float16
    chat_file(folder / "chat.jsonl", 120)
    return folder


@pytest.fixture
def config(place: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def made(model: str = "model", **values: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "model": str(place / model),
            "data": [str(place / "chat.jsonl")],
            "out": str(tmp_path / "run"),
            "length": 64,
            "steps": STEPS,
            "learning_rate": 2e-3,
            "devices": "virtual:2",
            "dtype": "float16",
            "samples": 0,
            "held_out": 4.0,
        }
        return TrainConfig(**{**usual, **values})

    return made


def steps_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [line for line in repeatable_lines(Path(config.out)) if "loss" in line]


def test_a_run_scales_its_losses_and_learns(config: Callable[..., TrainConfig], capsys: Any) -> None:
    ours = config()
    assert run(ours, resume=False) == 0
    steps = steps_of(ours)
    assert [(line["loss_scale"], line["skipped_steps"]) for line in steps] == [(65536, 0)] * STEPS
    assert 1 < steps[0]["loss"] < 10, "a loss is not shown by its scale"
    held_out = [line["evaluation_loss"] for line in repeatable_lines(Path(ours.out)) if "evaluation_loss" in line]
    assert held_out[1] < held_out[0] - 0.2
    assert "  scale 65536  skipped 0  " in capsys.readouterr().out
    report = (Path(ours.out) / "report.html").read_text()
    assert "0, as a gradient in float16 was inf or NaN" in report and "65536 in the first step" in report
    assert AutoModelForCausalLM.from_pretrained(Path(ours.out) / "model").dtype == torch.float16


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"asynchronous": True},
        {"rows": "padded", "clip": 0.0},
        pytest.param({"lora": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_has_the_bits_of_a_loop_with_a_scaler(
    more: dict[str, Any], config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    ours = config("louder" if more.get("lora") else "loud", **more, held_out=0.0)
    assert run(ours, resume=False) == 0
    roundpipe.devices("virtual:1")
    data = read_data(ours, byte_tokenizer(), tmp_path / "data", RunNodes.alone())
    transformers.set_seed(ours.seed)
    model = load_model(ours)
    optimizer = make_optimizer(model, ours)
    schedule = make_schedule(optimizer, ours, STEPS)
    scaler = roundpipe.GradScaler()
    skipped = 0
    for line, batch in zip(steps_of(ours), data.train, strict=False):
        scale = scaler.get_scale()
        cut = balanced_config(batch, 3)
        pending = model.submit(
            input_kwargs=batch,
            loss_fn=lambda outputs, _, parts=cut.num_microbatch: scaler.scale(outputs.loss / parts),
            run_config=cut,
        )
        clip = ours.clip or math.inf
        made = model.step(optimizer, ours.asynchronous, scaler=scaler, max_grad_norm=clip, lr_scheduler=schedule)
        skipped += made.skipped
        found = (line["loss"], line["loss_scale"], line["skipped_steps"])
        assert found == (float(pending.loss()) / scale, scale, skipped)
    assert 0 < skipped < STEPS


@pytest.mark.parametrize("arithmetic", mostly_long(["exact", "fast"], "fast"))
def test_any_number_of_devices_has_the_same_bits(
    arithmetic: str, config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_FP16_ACCUMULATION", "1")  # without effect on virtual devices
    runs = [
        config(
            "loud", arithmetic=arithmetic, microbatches=3, devices=f"virtual:{count}", out=str(tmp_path / str(count))
        )
        for count in (1, 3)
    ]
    assert [run(each, resume=False) for each in runs] == [0, 0]
    assert repeatable_lines(Path(runs[0].out)) == repeatable_lines(Path(runs[1].out))
    assert "virtual:3, fp16 accumulation" in (tmp_path / "3" / "report.html").read_text()
    monkeypatch.delenv("ROUNDPIPE_FP16_ACCUMULATION")
    plain = dataclasses.replace(runs[0], out=str(tmp_path / "plain"))
    assert run(plain, resume=False) == 0
    assert repeatable_lines(Path(plain.out)) == repeatable_lines(Path(runs[0].out))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_scaled_losses_of_the_model_have_plain_torchs_gradients(native: bool, rows: int) -> None:
    roundpipe.devices("virtual:2")
    plain, ours = (tiny_llama(num_hidden_layers=2, dtype=torch.float16) for _ in range(2))
    model = roundpipe.wrap_model_to_roundpipe(ours, native=native).train()
    tokens = torch.randint(260, (rows, 24), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[-1, 5:9] = -100
    scaler = roundpipe.GradScaler("cpu", 2.0**10)
    loss = model.forward_backward(
        input_kwargs={"input_ids": tokens, "labels": labels},
        loss_fn=ScaledOutputs(scaler),
        run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1),
    )
    model.synchronize()
    expected = plain(input_ids=tokens, labels=labels).loss * 2.0**10
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad), name


@sweep("more, stopped", [{"asynchronous": True, "lora": True, "lora_dropout": 0.2}, {}], [1, 4], ids=str, together=0)
def test_an_interrupted_run_goes_on_with_the_same_bits(
    more: dict[str, Any], stopped: int, config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: Any
) -> None:
    loud = "louder" if more.get("lora") else "loud"
    whole, ours = (config(loud, **more, out=str(tmp_path / name)) for name in ("whole", "run"))
    assert run(whole, resume=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt(f"step {stopped}/"))
        assert run(ours, resume=False) == 130
    assert len(steps_of(ours)) < STEPS
    assert run(ours, resume=True) == 0
    assert repeatable_lines(Path(ours.out)) == repeatable_lines(Path(whole.out))
    assert 0 < steps_of(ours)[-1]["skipped_steps"] < STEPS


@pytest.mark.parametrize("more", mostly_long([{}, {"asynchronous": True}], {"asynchronous": True}), ids=str)
def test_a_run_that_was_killed_goes_on_from_a_checkpoint(
    more: dict[str, Any], config: Callable[..., TrainConfig], capsys: Any
) -> None:
    ours = config("loud", **more, save_every=2, keep=9)
    assert run(ours, resume=False) == 0
    expected, out = repeatable_lines(Path(ours.out)), Path(ours.out)
    _core.wait_for_saves(str(out))
    for left in ("model", "step-4", "report.html"):  # as if it had ended behind step 3
        shutil.rmtree(out / left) if (out / left).is_dir() else (out / left).unlink()
    assert run(ours, resume=True) == 0
    assert repeatable_lines(Path(ours.out)) == expected
    assert "going on after step 2" in capsys.readouterr().out


def test_a_model_whose_values_do_not_fit_ends_the_run(
    config: Callable[..., TrainConfig], tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ValueError, match="logits of llama in float16 are inf or NaN"):
        run(config("hopeless", steps=40), resume=False)
    ours = config("hopeless", steps=40, rows="padded", out=str(tmp_path / "padded"))
    assert run(ours, resume=False) == 1
    said = capsys.readouterr().err
    assert "a gradient of step 17 is inf or NaN although its loss was scaled by 1, and 17 steps were skipped" in said
    assert "float16" in said and "--dtype bfloat16" in said
    steps = steps_of(ours)
    assert [line["loss_scale"] for line in steps] == [2.0**n for n in range(16, 0, -1)]
    assert steps[-1]["skipped_steps"] == 16 and steps[-1]["loss"] is None


def test_the_dtype_of_the_files_counts(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, dtype=torch.float16).save_pretrained(tmp_path / "half")
    byte_tokenizer().save_pretrained(tmp_path / "half")
    ours = config(dtype=None, steps=1)
    halved = dataclasses.replace(ours, model=str(tmp_path / "half"))
    assert run(halved, resume=False) == 0
    assert steps_of(halved)[0]["loss_scale"] == 65536
    other = dataclasses.replace(ours, out=str(tmp_path / "other"))
    assert run(other, resume=False) == 0
    assert "loss_scale" not in steps_of(other)[0]
