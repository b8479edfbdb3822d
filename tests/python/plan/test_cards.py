"""Cards: their files, the work that a meter counts for them, and the plans that are made with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from roundpipe import _core
from roundpipe.cli import app
from roundpipe.plan import cards, machine
from roundpipe.plan.cards import Card
from roundpipe.plan.machine import Machine
from roundpipe.plan.shape_meter import ShapeMeter

CARD = Card({"bf16": 100.0, "fp16-accumulate": 200.0}, attention_tflops=80.0, memory_gb_per_s=900.0, launch_us=4.0)
QUICK = ("--search-seconds", "0.001", "--json")


def run(*options: str) -> str:
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def model(tmp_path: Path) -> str:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_machine_file_has_its_card(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    Machine("one", [(1.0, 0)], {}, card=CARD).save(path)
    assert machine.load(path).card == CARD
    Machine("one", [(1.0, 0)], {}).save(path)
    assert machine.load(path).card is None
    path.write_text(Machine("one", [(1.0, 0)], {}, card=CARD).text().replace("bf16", "bf17"))
    with pytest.raises(ValueError, match=r"\[machine\] card.product_tflops has an unknown field 'bf17'"):
        machine.load(path)


def test_cards_by_name() -> None:
    assert cards.names() == ["rtx-3090", "rtx-4090", "rtx-5090", "h100"]
    for name in cards.names():
        named = cards.named(name)
        assert named.memory_bytes > 2e10 and named.link_gb_per_s > 0 and "bf16" in named.card.product_tflops
    with pytest.raises(ValueError, match=r"\[card\] there is no card 'rtx-1', expected one of rtx-3090"):
        cards.named("rtx-1")
    with pytest.raises(ValueError, match=r"\[card\] there is no rate of fp32 products, expected one of bf16, fp16-acc"):
        CARD.in_core("fp32")


def test_the_meter_counts_each_kind_of_kernel_once() -> None:
    with torch.device("meta"):
        rows, weight = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, 32, dtype=torch.bfloat16)
        heads = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)
        table, ids = torch.empty(100, 4), torch.empty(5, dtype=torch.int64)
    with torch.no_grad(), ShapeMeter([rows, weight, heads, table, ids]) as meter:
        product = rows @ weight
        work = meter.work
        assert (work.product_operations, work.products) == (2 * 8 * 16 * 32, 1)
        product.view(4, 64).t()[:1].expand(64, 4)
        torch.empty_like(product)
        assert meter.work.element_kernels == 0
        product + product[:1]  # 256 numbers and 32, of two bytes; 256 are written
        assert meter.work.element_bytes == 2 * (256 + 32 + 256)
        product.mul_(2)  # read and written
        assert meter.work.element_bytes == 2 * (256 + 32 + 256) + 2 * (256 + 256)
        before = meter.work
        F.embedding(ids, table)  # five rows, and their numbers
        found = meter.work - before
        assert (found.element_bytes, found.element_kernels) == (2 * 5 * 4 * 4 + 5 * 8, 1)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads, is_causal=True)
    assert meter.work.attentions == 1 and meter.work.attention_operations == 2 * 2 * 8 * 8 * 64
    assert meter.work.products == 1


def test_the_work_of_a_layer_of_1_7b() -> None:
    from transformers import Qwen3Config

    from roundpipe.plan.shapes import make_model, measure

    config = Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    tokens = 8192
    layer = measure(make_model(config), tokens).layers[1]
    # A profile of the same layer on a card: 407 KB a token forward beside 7 products, 932 KB backward beside 14.
    assert layer.forward.element_bytes / tokens == pytest.approx(407e3, rel=0.01)
    assert layer.backward.element_bytes / tokens == pytest.approx(932e3, rel=0.02)
    assert (layer.forward.products, layer.backward.products) == (7, 14)
    assert layer.forward.product_operations == 2 * tokens * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    fast = measure(make_model(config), tokens, arithmetic="fast")
    fused = fast.layers[1]
    assert fast.arithmetic == "fast"
    assert fused.forward.element_bytes <= 100e3 * tokens and fused.backward.element_bytes <= 180e3 * tokens
    assert fused.footprint.saved < 0.65 * layer.footprint.saved
    for name in ("products", "product_operations", "attentions", "attention_operations"):
        assert getattr(fused.forward, name) == getattr(layer.forward, name)
        assert getattr(fused.backward, name) == getattr(layer.backward, name)


def test_layers_without_a_fast_form_are_named() -> None:
    from transformers import GPT2Config

    from roundpipe.plan.shapes import make_model, measure

    model = make_model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
    fast, exact = (measure(model, 8, arithmetic=form) for form in ("fast", "exact"))
    assert fast.arithmetic.startswith("fast, but exact: ") and "GPT2Block has no native form" in fast.arithmetic
    assert exact.arithmetic == "exact"
    assert [str(layer.footprint) for layer in fast.layers] == [str(layer.footprint) for layer in exact.layers]


def test_plans_with_a_card(tmp_path: Path, model: str) -> None:
    path = tmp_path / "machine.toml"
    # So small a model takes as long as its launches.
    card = dataclasses.replace(CARD, launch_us=0.0)
    Machine("one", [(1.0, 0)], {"host_gb_per_s": 0.0}, card=card).save(path)
    options = ("plan", model, "--tokens", "1024", "--machine", str(path), *QUICK)
    exact = json.loads(run(*options))["step_ms"]
    faster = json.loads(run(*options, "--products", "fp16-accumulate"))["step_ms"]
    assert faster < exact
    fused = json.loads(run(*options, "--arithmetic", "fast"))
    assert fused["step_ms"] < exact and fused["arithmetic"] == "fast"
    named = json.loads(run("plan", model, "--tokens", "1024", "--card", "rtx-3090", "--devices", "1", *QUICK))
    assert named["memory"]["device_memory"] == 24_000_000_000
    for more, match in (
        (("--card", "rtx-4090", "--tflops", "5"), "--card has no effect here, expected it only with no --tflops"),
        (("--products", "fp16"), "--products has no effect here, expected it only with --card or --machine"),
        (("--products", "int3", "--card", "h100"), "--products is int3"),
        (("--card", "none"), "there is no card 'none'"),
        (("--arithmetic", "slow"), "--arithmetic is slow, expected exact or fast"),
    ):
        with pytest.raises(ValueError, match=match):
            run("plan", model, *more)
    with pytest.raises(ValueError, match="costs are for their own batch"):
        run("plan", "qwen3-1.7b", "--card", "h100")


def test_a_card_that_has_no_limit_takes_no_time() -> None:
    work = _core.LayerWork(product_operations=1e12, element_bytes=1e9, products=3)
    assert _core.time_ms(work, _core.Card()) == 0
    assert _core.time_ms(work, CARD.in_core()) == pytest.approx(1e12 / 100e9 + 1e9 / 900e6)


def test_attention_is_no_faster_than_products_and_devices_share() -> None:
    card = dataclasses.replace(CARD, product_tflops={"bf16": 100.0, "fp32": 20.0})
    assert (card.in_core().attention_tflops, card.in_core("fp32").attention_tflops) == (80.0, 20.0)
    assert dataclasses.replace(card, product_tflops={"bf16": 0.0}).in_core().attention_tflops == 80.0
    half = card.shared(2).in_core()
    assert (half.product_tflops, half.attention_tflops, half.memory_gb_per_s) == (50.0, 40.0, 450.0)
