"""That every value of a configuration has its effect."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.model.memory.budget import UpdateRule, predict_model
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData, read_data
from roundpipe.train.model import check_run, load_model, meta_model
from roundpipe.train.nodes import RunNodes
from roundpipe.train.optimizer import make_optimizer, make_schedule
from roundpipe.train.session import run
from tiny_chat import byte_tokenizer, chat_file, model_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    model_folder(folder / "model", num_hidden_layers=2)
    chat_file(folder / "chat.jsonl", 40)
    return folder


@pytest.fixture
def made(place: Path) -> Callable[..., TrainConfig]:
    def config(**values: Any) -> TrainConfig:
        usual: dict[str, Any] = {"model": str(place / "model"), "data": [str(place / "chat.jsonl")], "length": 64}
        return TrainConfig(**{**usual, **values})

    return config


@pytest.fixture
def read(made: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., RunData]:
    count = iter(range(100))

    def data(**values: Any) -> RunData:
        return read_data(made(**values), byte_tokenizer(), tmp_path / f"data-{next(count)}", RunNodes.alone())

    return data


def first(data: RunData) -> dict[str, torch.Tensor]:
    return next(iter(data.train))


def test_options_of_the_data(read: Callable[..., RunData], tmp_path: Path) -> None:
    usual = read()
    assert not torch.equal(first(usual)["input_ids"], first(read(seed=1))["input_ids"])
    assert usual.held_out_samples[0]["input_ids"].tolist() != read(seed=1).held_out_samples[0]["input_ids"].tolist()
    assert len(read(held_out=0.25).held_out_samples) == 10
    assert len(read(held_out=3.0).held_out_samples) == 3
    assert not read(held_out=0.0).held_out
    ordered = read(in_order=True, held_out=0.0)
    assert byte_tokenizer().decode(first(ordered)["input_ids"][0]).startswith("<|im_start|>user\na 3<")
    assert "position_ids" in first(usual) and "attention_mask" in first(read(rows="padded"))
    assert first(usual)["input_ids"].shape[1] <= 64 < first(read(length=128))["input_ids"].shape[1]
    assert len(read(batch_tokens=64).train) > len(usual.train)
    assert read(epochs=3).steps == 3 * usual.steps and read(steps=2).steps == 2
    counted = [int((first(read(train_on=which))["labels"] != -100).sum()) for which in ("assistant", "all")]
    assert counted[0] < counted[1]
    text = tmp_path / "text.txt"
    text.write_text("one line\n\nanother line that is long\n")
    files = {"data": [str(text)], "held_out": 0.0}
    assert read(**files).summary.samples == 1 and read(**files, documents="line").summary.samples == 2
    assert read(**files).summary.tokens == read(**files, ends=False).summary.tokens + 1
    assert read(**files, length=16).summary.samples > 1
    short = read(**files, documents="line", length=16, overlong="drop").summary
    assert short.samples == 1
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"body": "one"}\n{"body": "two"}\n{"bo\n')
    renamed = read(data=[str(odd)], held_out=0.0, fields=["text=body"], format="text").summary
    assert renamed.samples == 2 and len(list(renamed.problems)) == 1
    with pytest.raises(ValueError, match=r"odd\.jsonl:3"):
        read(data=[str(odd)], held_out=0.0, fields=["text=body"], on_bad="error")


def test_options_of_the_model(made: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert {p.dtype for p in load_model(made(dtype="bfloat16")).parameters()} == {torch.bfloat16}
    fast = load_model(made(arithmetic="fast", rows="padded")).layers_are_native
    assert str(fast) == "all 2 decoder layers run natively, in fast arithmetic"
    lora = load_model(made(lora=True, lora_rank=3, lora_alpha=6.0, lora_dropout=0.25, lora_targets=["q_proj"]))
    peft = lora.peft_config["default"]
    assert (peft.r, peft.lora_alpha, peft.lora_dropout, peft.use_rslora, peft.use_dora) == (3, 6.0, 0.25, False, False)
    names = [name for name, parameter in lora.named_parameters() if parameter.requires_grad]
    assert names and all("q_proj.lora_" in name for name in names)
    assert load_model(made(lora=True, lora_rslora=True)).peft_config["default"].use_rslora
    assert any("magnitude" in name for name, _ in load_model(made(dora=True)).named_parameters())
    lora.save_pretrained(tmp_path / "adapter")
    again = load_model(made(adapter=str(tmp_path / "adapter"), model=""))
    assert [name for name, parameter in again.named_parameters() if parameter.requires_grad] == names
    with pytest.raises(ValueError, match=r"(?s)\[train\] .*does not fit on the host"):
        check_run(made(host_memory="1MB"))
    totals = [predict_model(meta_model(made()), UpdateRule("adamw", moments)).total for moments in ("fp32", "8bit")]
    between = f"{sum(totals) // 2}B"
    with pytest.raises(ValueError, match="moments='8bit' in the optimizer"):
        check_run(made(host_memory=between))
    load_model(made(host_memory=between, moments="8bit"))
    model = load_model(made(device_memory="10MB", microbatches=2, recompute_by_layer=True, fault_tolerant=True))
    config = model._run_config
    assert (config.num_microbatch, config.recompute_grain, config.fault_tolerant) == (2, "layer", True)
    assert model._device_budget == 10_000_000


def test_options_of_the_optimizer(made: Callable[..., TrainConfig]) -> None:
    model = load_model(made())

    def group(**values: Any) -> dict[str, Any]:
        return dict(make_optimizer(model, made(**values)).param_groups[0])

    assert group(learning_rate=0.5)["lr"] == 0.5
    assert group(weight_decay=0.25)["weight_decay"] == 0.25
    assert make_optimizer(model, made(weight_decay=0.25)).param_groups[-1]["weight_decay"] == 0
    assert group(beta1=0.5)["betas"] == (0.5, 0.999) and group(beta2=0.5)["betas"] == (0.9, 0.5)
    assert group(eps=1e-3)["eps"] == 1e-3
    assert group(optimizer="sgd", momentum=0.5)["momentum"] == 0.5
    assert make_optimizer(model, made(moments="8bit")).format_name == "8bit"
    narrow = load_model(made(dtype="bfloat16"))
    exact = make_optimizer(narrow, made(dtype="bfloat16")).host_memory().masters
    assert make_optimizer(narrow, made(dtype="bfloat16", masters="24bit")).host_memory().masters == exact // 2
    names = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adafactor": "Adafactor"}
    for optimizer, name in (names | {"rmsprop": "RMSprop"}).items():
        assert type(make_optimizer(model, made(optimizer=optimizer))).__name__ == name


def test_muon_is_for_the_matrices_of_layers(made: Callable[..., TrainConfig]) -> None:
    config = made(optimizer="muon", momentum=0.5, beta2=0.25, eps=1e-3, weight_decay=0.125, learning_rate=0.5)
    model = load_model(config)
    optimizer = make_optimizer(model, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        own = {names[id(parameter)] for parameter in group["params"]}
        assert (group["lr"], group["adjust_lr_fn"]) == (0.5, "match_rms_adamw")
        if group["use_muon"]:
            assert all("_proj.weight" in name for name in own)
            assert (group["momentum"], group["eps"], group["weight_decay"]) == (0.5, 1e-7, 0.125)
            continue
        assert (group["betas"], group["eps"]) == ((0.9, 0.25), 1e-3)
        norms = {name for name in own if "norm" in name}
        assert norms in (own, set())
        assert group["weight_decay"] == (0 if norms else 0.125)
        assert norms or all("embed_tokens" in name or "lm_head" in name for name in own)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    predicted = predict_model(meta_model(config), UpdateRule("muon")).moments
    assert optimizer.host_memory().moments == predicted


def test_the_rate_follows_the_schedule(made: Callable[..., TrainConfig]) -> None:
    config = made(learning_rate=0.5, schedule="linear", warmup_steps=1, floor=0.5)
    optimizer = make_optimizer(load_model(config), config)
    schedule = make_schedule(optimizer, config, steps=3)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 0.5, 0.375, 0.25]
    assert schedule.state_dict()["lr_lambdas"] == [None] * len(optimizer.param_groups)


def test_options_of_a_run(made: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that show only in a run; the others are in `test_train_run.py`."""

    def lines(name: str, **values: Any) -> list[dict[str, Any]]:
        config = made(out=str(tmp_path / name), steps=3, learning_rate=1e-2, samples=0, **values)
        assert run(config, resume=False) == 0
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    one = lines("one", devices="virtual:1", log_every=2)
    assert roundpipe.devices().description == "virtual:1"
    said = capsys.readouterr().out
    assert "step 1/3" not in said and "step 2/3" in said and "step 3/3" in said
    asked = {"sample_prompts": ["a 3"], "sample_tokens": 2, "tensorboard": True}
    two = lines("two", devices="virtual:1", **asked, clip=1e-3, evaluate_every=1)
    assert len(two) == len(one) + 2
    assert one[1]["grad_norm"] == two[1]["grad_norm"] > 1e-3
    sample = json.loads((tmp_path / "two" / "samples.jsonl").read_text().splitlines()[0])
    assert "a 3" in sample["prompt"] and len(byte_tokenizer()(sample["text"])["input_ids"]) <= 6
    assert list((tmp_path / "two" / "tensorboard").iterdir())
    late = lines("late", devices="virtual:1", asynchronous=True)
    losses = [[line["loss"] for line in run if "loss" in line] for run in (one, two, late)]
    assert losses[0][0] == losses[1][0] == losses[2][0]
    assert losses[0][2] != losses[1][2] and losses[0][1] != losses[2][1]


def test_no_option_is_left_out() -> None:
    """Each is given to a configuration somewhere in these files."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("**/test_*.py"))
    for field in dataclasses.fields(TrainConfig):
        assert re.search(rf'\b{field.name}=|"{field.name}": ', text), field.name
