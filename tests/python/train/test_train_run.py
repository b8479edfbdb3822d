"""Whole runs of `roundpipe train`: what they learn, stop, resume, write and refuse."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import roundpipe
from interrupted_output import InterruptedAt
from roundpipe import _core
from roundpipe.export.quantised_folder import quantise_folder
from roundpipe.train.config import TrainConfig
from roundpipe.train.config_file import written_config
from roundpipe.train.dry_run import dry_run
from roundpipe.train.model import load_model, save_result
from roundpipe.train.nodes import RunNodes
from roundpipe.train.run_folder import RunFolder
from roundpipe.train.session import run
from tiny_chat import byte_tokenizer, chat_file, model_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 6
LENGTH = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    model_folder(folder / "model", num_hidden_layers=2)
    chat_file(folder / "chat.jsonl", 120)
    return folder


@pytest.fixture
def config(place: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def made(**values: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "model": str(place / "model"),
            "data": [str(place / "chat.jsonl")],
            "out": str(tmp_path / "run"),
            "length": LENGTH,
            "steps": STEPS,
            "learning_rate": 2e-3,
            "devices": "virtual:2",
        }
        return TrainConfig(**{**usual, **values})

    return made


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    """The lines, without times."""
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in KEPT} for line in lines]


KEPT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "evaluation_loss", "evaluation_tokens")


def held_out(lines: list[dict[str, Any]]) -> list[float]:
    return [line["evaluation_loss"] for line in lines if "evaluation_loss" in line]


@pytest.mark.parametrize("kind", ["full", "lora", pytest.param("dora", marks=pytest.mark.long)])
def test_training_lowers_the_held_out_loss_and_reloads(
    kind: str, place: Path, config: Callable[..., TrainConfig]
) -> None:
    ours = config(**({} if kind == "full" else {kind: True, "learning_rate": 2e-2}), evaluate_every=3, samples=2)
    assert run(ours, resume=False) == 0
    lines = metrics(ours)
    first, middle, last = held_out(lines)
    assert last < middle < first - 0.2
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    result = Path(ours.out) / ("model" if kind == "full" else "adapter")
    samples = [json.loads(line) for line in (Path(ours.out) / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 0, 3, 3, 6, 6] and samples[0]["expected"]
    report = (Path(ours.out) / "report.html").read_text()
    assert samples[-1]["expected"].split("<")[0] in report and "A step on the devices" in report
    assert AutoTokenizer.from_pretrained(result)("abc")["input_ids"] == byte_tokenizer()("abc")["input_ids"]
    if kind == "full":
        assert isinstance(GenerationConfig.from_pretrained(result), GenerationConfig)
        plain = AutoModelForCausalLM.from_pretrained(result)
    else:
        base = AutoModelForCausalLM.from_pretrained(place / "model")
        plain = PeftModel.from_pretrained(base, str(result))
    again = config(
        **({"model": str(result)} if kind == "full" else {"adapter": str(result), "model": ""}), rows="padded"
    )
    row = torch.randint(260, (1, 16), generator=torch.Generator().manual_seed(0))  # several would be cut
    with torch.no_grad():
        assert torch.equal(load_model(again).eval()(input_ids=row).logits, plain.eval()(row).logits)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="full", marks=pytest.mark.long),
        pytest.param({"lora": True, "lora_dropout": 0.2, "asynchronous": True}, id="lora"),
        pytest.param({"optimizer": "muon", "asynchronous": True}, id="muon", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_goes_on_with_the_same_bits(
    more: dict[str, Any], config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config(**more, out=str(tmp_path / "whole"), evaluate_every=2)
    assert run(whole, resume=False) == 0
    ours = config(**more, evaluate_every=2)
    said = InterruptedAt("step 2/")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", said)
        assert run(ours, resume=True) == 130  # there is nothing to go on from: it begins
    assert f"roundpipe train --resume --out {ours.out}" in said.getvalue()
    assert len(metrics(ours)) < len(metrics(whole))
    (Path(ours.out) / "metrics.jsonl").open("a").write('{"step": 6, "loss": 1}\n{"ste')  # steps done again
    assert run(ours, resume=True) == 0
    assert metrics(ours) == metrics(whole)


def test_a_run_goes_on_with_the_samples_that_it_began_with(
    config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = chat_file(tmp_path / "chat.jsonl", 30)
    more = {"data": [str(data)], "steps": 5, "samples": 0, "held_out": 2.0}
    whole, ours = config(**more, out=str(tmp_path / "whole")), config(**more)
    assert run(whole, resume=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/"))
        assert run(ours, resume=False) == 130
    chat_file(data, 33, capitals=True)
    assert run(ours, resume=True) == 0
    assert "the data or the tokenizer has changed since the run began" in capsys.readouterr().err
    assert metrics(ours) == metrics(whole)


def test_a_termination_is_no_failure(config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = config()
    monkeypatch.setattr(sys, "stdout", InterruptedAt("step 1/", signal.SIGTERM))
    assert run(ours, resume=False) == 0
    assert roundpipe.latest(ours.out) is not None
    assert not (Path(ours.out) / "model").exists()


@pytest.mark.parametrize(("asked", "made"), [(None, 3), (4, 4)])
def test_steps_have_as_many_microbatches_as_asked_for(
    asked: int | None, made: int, config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def submit(model: Any, **call: Any) -> Any:
        numbers.append(call["run_config"].num_microbatch)
        return submitted(model, **call)

    submitted = roundpipe.RoundPipe.submit
    monkeypatch.setattr(roundpipe.RoundPipe, "submit", submit)
    assert run(config(steps=1, held_out=0, microbatches=asked), resume=False) == 0
    assert numbers == [made]


def test_checkpoints_are_made_and_kept(config: Callable[..., TrainConfig]) -> None:
    ours = config(save_every=1, keep=2)
    assert run(ours, resume=False) == 0
    _core.wait_for_saves(str(ours.out))
    assert sorted(path.name for path in Path(ours.out).glob("step-*")) == ["step-4", "step-5"]


@pytest.mark.long
def test_another_run_is_not_touched(config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = config()
    monkeypatch.setattr(sys, "stdout", InterruptedAt("step 1/"))
    run(ours, resume=False)
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in Path(ours.out).rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="is not empty, expected a new folder"):
        run(ours, resume=False)
    with pytest.raises(ValueError, match=r"--seed is 1, expected 0 as in the run"):
        run(config(seed=1), resume=True)
    assert {path: path.read_bytes() for path in Path(ours.out).rglob("*") if path.is_file()} == before
    assert run(ours, resume=True) == 0
    with pytest.raises(ValueError, match="holds the result of a run that is complete"):
        run(ours, resume=True)


def test_the_model_of_the_pipeline_is_the_one_that_is_saved(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    model = load_model(config())
    save_result(model, byte_tokenizer(), tmp_path / "saved")
    with pytest.raises(ValueError, match="is not empty"):
        save_result(model, byte_tokenizer(), tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_refused_before_training_leaves_no_run(
    config: Callable[..., TrainConfig], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, **values: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run(config(**values), resume=False)

    refused("nothing.jsonl", data=[str(tmp_path / "nothing.jsonl")])
    refused("is not a folder", model=str(tmp_path / "nothing"))
    refused("which has no adapter_config.json", model="", adapter=str(place / "model"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text((place / "chat.jsonl").read_text() + "{\n")
    refused(r"broken\.jsonl:121", data=[str(broken)], on_bad="error")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    refused("has preference pairs, expected texts or conversations", data=[str(pairs)], held_out=0.0)
    refused("expected at most the number of steps", epochs=1, steps=None, warmup_steps=10_000)
    long = tmp_path / "long.txt"
    long.write_text("word " * 200)
    refused("max_position_embeddings = 256", data=[str(long)], held_out=0.0, length=512)
    new = str(tmp_path / "new.jsonl")
    Path(new).write_text('{"prompt": "a", "completion": "<7>"}\n' * 60)
    model_folder(tmp_path / "unpadded", num_hidden_layers=1)
    byte_tokenizer(pad_token=None, eos_token=None).save_pretrained(tmp_path / "unpadded")
    refused("no padding token and no end-of-text token", model=str(tmp_path / "unpadded"))
    more = byte_tokenizer()
    more.add_tokens([f"<{number}>" for number in range(9)])
    model_folder(tmp_path / "small", num_hidden_layers=1)
    more.save_pretrained(tmp_path / "small")
    refused(r"has the token \d+, and the model's embedding has 260 rows", model=str(tmp_path / "small"), data=[new])
    (tmp_path / "file").write_text("")
    refused("a file, expected a folder", out=str(tmp_path / "file"))
    refused("cannot create", out=str(tmp_path / "file" / "run"))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="RANK is not set"):
        patch.setenv("WORLD_SIZE", "2")
        run(config(), resume=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("pip install wandb", wandb="project", out=str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    assert run(config(steps=1), resume=False) == 0  # what was refused is no run


def test_a_missing_shard_is_named(config: Callable[..., TrainConfig], place: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    byte_tokenizer().save_pretrained(tmp_path / "sharded")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        run(config(model=str(tmp_path / "sharded")), resume=False)


def test_a_disk_without_room_is_found_before_training(config: Callable[..., TrainConfig]) -> None:
    folder = RunFolder(config(save_every=1, keep=2), resume=False, nodes=RunNodes.alone())
    folder.begin()
    with pytest.raises(ValueError, match=r"iB left, expected .* for the result and 3 checkpoints of [0-9.]+ [KMGT]iB"):
        folder.require_space(1, 10**17)
    with pytest.raises(ValueError, match="cannot hold the result"), folder.reserved(10**17):
        pass
    with folder.reserved(12345):
        (reserve,) = (path for path in folder.path.iterdir() if path.name.startswith("reserved"))
        assert reserve.stat().st_blocks * 512 >= 12345
        folder.release()
        assert not reserve.exists()
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]


def test_a_disk_that_fills_up_takes_no_step_away(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond a few bytes from the second step to the fourth."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if "step 2/" in text:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            if "step 4/" in text:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            return super().write(text)

    complaints = io.StringIO()
    ours = config(save_every=3)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            patch.setattr(sys, "stderr", complaints)
            assert run(ours, resume=False) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for said in ("when there is room", "training goes on without the journal", "step 3 was not saved"):
        assert said in complaints.getvalue()
    assert [line["step"] for line in metrics(ours)] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert (Path(ours.out) / "model" / "model.safetensors").exists()


def test_an_error_in_a_step_says_how_to_go_on(
    config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = config(save_every=1, learning_rate=1e30, steps=4)  # the loss becomes NaN
    assert run(ours, resume=False) == 1
    said = capsys.readouterr().err
    assert "NaN" in said and f"go on with\n  roundpipe train --resume --out {ours.out}" in said
    assert not (Path(ours.out) / "model").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    kind: str, config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    more = {"save_every": 2, "evaluate_every": 3, "steps": 12} | ({"lora": True} if kind == "lora" else {})
    whole = config(**more, out=str(tmp_path / "whole"))
    assert run(whole, resume=False) == 0
    ours = config(**more)
    (tmp_path / "run.toml").write_text(written_config(ours))
    command = [sys.executable, "-m", "roundpipe.cli", "train", "--config", str(tmp_path / "run.toml"), "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(Path(roundpipe.__file__).parents[1])}
    for killed_at in (1, 4, 6, 9):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(f"step {killed_at}/"):
                    process.kill()
                    break
    assert run(ours, resume=True) == 0
    assert metrics(ours) == metrics(whole)
    result = "adapter" if kind == "lora" else "model"
    for file in (Path(whole.out) / result).glob("*.safetensors"):
        assert (Path(ours.out) / result / file.name).read_bytes() == file.read_bytes()


def test_adapters_train_on_an_encoded_base(config: Callable[..., TrainConfig]) -> None:
    ours = config(lora=True, quantise="nf4", quantise_keep=["down_proj"])
    run(ours, False)
    losses = [line["loss"] for line in metrics(ours) if "loss" in line]
    assert losses[-1] < losses[0]
    model = load_model(ours)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight_codes"] == torch.uint8
    assert kinds["base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"] == torch.float32
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(ours.model), Path(ours.out) / "adapter")


@pytest.mark.parametrize("does", [run, lambda config, resume: dry_run(config, resume, print)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "holds quantised weights, which are frozen, expected adapters to train: --lora"),
        ({"lora": True, "lora_targets": ["nothing"]}, "Target modules .*nothing.* not found"),
        ({"lora": True, "host_memory": "10KB"}, "(?s)does not fit on the host"),
    ],
    ids=["frozen", "targets", "host"],
)
def test_what_does_not_fit_the_model_is_refused_before_data_is_read(
    does: Callable[..., Any],
    options: dict[str, Any],
    message: str,
    config: Callable[..., TrainConfig],
    tmp_path: Path,
) -> None:
    base = quantise_folder(config().model, tmp_path / "base", "int8").folder
    ours = config(model=str(base), data=[str(tmp_path / "nowhere")], **options)
    if "host_memory" in options and does is not run:
        message = "nowhere"  # a dry run says at its end what does not fit
    with pytest.raises(ValueError, match=message):
        does(ours, False)


@pytest.mark.parametrize("name", ["device_memory", "host_memory"])
@pytest.mark.parametrize("size", ["20", "0", "0GB", "much", "-1GB"])
def test_budgets_that_are_no_sizes_are_refused_by_name(name: str, size: str) -> None:
    flag = name.replace("_", "-")
    with pytest.raises(ValueError, match=rf"--{flag} is {size}, expected bytes above 0 and their unit, such as 20GB"):
        TrainConfig(**{name: size})  # type: ignore[arg-type]


def test_encoding_without_adapters_is_refused(config: Callable[..., TrainConfig]) -> None:
    with pytest.raises(ValueError, match="--quantise is nf4, expected it only where adapters train"):
        run(config(quantise="nf4"), False)
    with pytest.raises(ValueError, match=r"--quantise-keep is .*, expected it only with --quantise"):
        run(config(lora=True, quantise_keep=["mlp"]), False)
