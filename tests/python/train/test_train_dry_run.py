"""What `--dry-run` predicts, and what it says would make a run fit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest

from roundpipe import _core
from roundpipe.plan.cards import Card
from roundpipe.plan.machine import Machine
from roundpipe.train.config import TrainConfig
from roundpipe.train.dry_run import dry_run
from roundpipe.train.model import lora_of
from sweeps import mostly_long
from tiny_chat import chat_file, model_folder, tiny_llama

CARD = Card(dict.fromkeys(("bf16", "fp16", "fp32"), 0.1), attention_tflops=0.1, memory_gb_per_s=5.0, launch_us=0.0)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def said(tmp_path: Path) -> Callable[..., tuple[bool, dict[str, str]]]:
    """The lines of a dry run by their first word, and whether it fits."""
    model_folder(tmp_path / "model")
    chat_file(tmp_path / "chat.jsonl", 60)
    rates = {"link_up_gb_per_s": 0.1, "link_down_gb_per_s": 0.1, "host_gb_per_s": 0.0}

    def run(card: Card | None = CARD, **values: Any) -> tuple[bool, dict[str, str]]:
        Machine("test", [(1.0, 0)] * 2, rates, 1.0, card=card).save(tmp_path / "machine.toml")
        usual: dict[str, Any] = {"length": 64, "devices": "virtual:2", "out": str(tmp_path / "run"), "steps": 7}
        data = {"model": str(tmp_path / "model"), "data": [str(tmp_path / "chat.jsonl")]}
        lines: list[str] = []
        fits = dry_run(TrainConfig(**{**usual, **data, **values}), False, lines.append, tmp_path / "machine.toml")
        return fits, {line.split()[0]: line for line in lines if line.split()}

    return run


def test_what_a_run_would_do(said: Callable[..., Any], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    fits, lines = said(evaluate_every=2, batch_tokens=512)
    assert fits and lines["fits"] == "fits (predicted)"
    assert "0.18 M parameters in float32" in lines["model"]
    assert "7 of at most 512 tokens, in 3 microbatches of at most 3 rows" in lines["steps"]
    assert "limited by" in lines["step"] and "with 4 evaluations" in lines["time"]
    assert "optimizer 1.00 GB/s" in lines["measured"]
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "machine.toml"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_host_that_is_too_small_has_a_verdict_for_weights_of_any_dtype(dtype: str, said: Callable[..., Any]) -> None:
    fits, lines = said(dtype=dtype, host_memory="1MB")
    assert not fits and lines["does"].startswith("does not fit (predicted): the host needs ")


def test_the_time_is_that_of_all_kernels_of_the_card(said: Callable[..., Any]) -> None:
    def step_ms(card: Card) -> float:
        return float(said(card)[1]["step"].split()[1].replace(",", ""))

    slow = dataclasses.replace(CARD, product_tflops=dict.fromkeys(CARD.product_tflops, 1e-4))
    assert step_ms(slow) > 20 * step_ms(CARD)
    assert step_ms(dataclasses.replace(CARD, memory_gb_per_s=0.01)) > 20 * step_ms(CARD)
    assert step_ms(dataclasses.replace(CARD, launch_us=1e4)) > 20 * step_ms(CARD)


def test_what_a_machine_file_lacks_is_measured(said: Callable[..., Any]) -> None:
    for card in (dataclasses.replace(CARD, product_tflops={"bf16": 1e-6}), None):
        assert float(said(card)[1]["step"].split()[1].replace(",", "")) < 1e4


def test_two_passes_take_another_forward_and_backward(said: Callable[..., Any]) -> None:
    found = re.match(
        r"step +([\d.,]+) ms .*of which ([\d.,]+) ms", said(gradients_at_once=True, clip_by="two_passes")[1]["step"]
    )
    assert found is not None
    both, measuring = (float(number.replace(",", "")) for number in found.groups())
    assert 0.2 * both < measuring <= 0.51 * both
    assert "of which" not in said(gradients_at_once=True, clip_by="last_norm")[1]["step"]


@pytest.mark.long
def test_memory_of_the_host_follows_the_configuration(said: Callable[..., Any]) -> None:
    totals = {}
    for name, values in {
        "full": {},
        "8bit": {"moments": "8bit"},
        "lion": {"optimizer": "lion"},
        "muon": {"optimizer": "muon"},
        "sgd": {"optimizer": "sgd"},
        "lora": {"lora": True, "lora_rank": 1},
        "bf16": {"dtype": "bfloat16"},
        "fp16": {"dtype": "float16"},
    }.items():
        line = said(**values)[1]["host"]
        totals[name] = _core.parse_bytes(re.sub(r"host +([\d.]+) (\w+) of.*", r"\1\2", line))
    assert totals["lora"] < totals["8bit"] < totals["lion"] < totals["full"]
    assert totals["sgd"] < totals["8bit"]
    assert totals["lion"] < totals["muon"] < totals["full"], "AdamW's moments of the tables"
    assert totals["bf16"] != totals["full"]
    assert totals["fp16"] > totals["bf16"], "masters of four bytes instead of remainders of two"


@pytest.mark.long
def test_checkpoints_on_the_disk(said: Callable[..., Any]) -> None:
    _, few = said(save_every=1, keep=1)
    _, many = said(save_every=1, keep=4)
    assert "2 x " in few["disk"] and "5 x " in many["disk"]


@pytest.mark.long
@pytest.mark.parametrize("values", mostly_long([{"lora": True}, {"dora": True, "lora_rank": 3}], {"lora": True}))
def test_adapters_are_those_of_a_run(values: dict[str, Any], said: Callable[..., Any], tmp_path: Path) -> None:
    for targets in (None, ["q_proj", "down_proj"]):
        config = TrainConfig(**values, lora_targets=targets)
        _, lines = said(**values, lora_targets=targets)
        model = peft.get_peft_model(tiny_llama(), lora_of(config))
        trained, of_all = model.get_nb_trainable_parameters()
        assert f"{of_all / 1e6:,.2f} M parameters" in lines["model"]
        assert f"of which {trained / 1e6:,.2f} M are trained" in lines["model"]
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / "model")
        model.save_pretrained(tmp_path / "adapter")
        assert said(model="", adapter=str(tmp_path / "adapter"))[1]["model"] == lines["model"]


@pytest.mark.long
def test_what_would_make_it_fit(said: Callable[..., Any]) -> None:
    fits, lines = said(host_memory="3MB")
    assert not fits and "the host needs" in lines["does"]
    assert lines["does"].endswith("it would with --gradients-at-once --clip-by last_norm")
    assert said(host_memory="2.1MB")[1]["does"].endswith("it would with --moments 8bit")
    fits, lines = said(device_memory="1.5MB", batch_tokens=512)
    assert not fits and "a device needs" in lines["does"] and "it would with --microbatches 8" in lines["does"]


@pytest.mark.long
def test_larger_changes_that_would_make_it_fit(said: Callable[..., Any]) -> None:
    assert "it would with --lora" in said(host_memory="2MB", optimizer="lion")[1]["does"]
    assert "give it more memory" in said(host_memory="1KB")[1]["does"]


def test_a_machine_of_other_devices_is_refused(said: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="has 2 devices, expected those of the run, which are 3"):
        said(devices="virtual:3")
