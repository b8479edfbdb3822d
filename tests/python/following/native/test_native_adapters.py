"""Projections with PEFT's LoRA adapters: the bits of the Python layers, and which adapters have no native form."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native_models import DTYPES, batch, check_plain_bits, native_and_python, wrap
from test_native_reasons import reason

import dense_models
import moe_models
import roundpipe
from roundpipe.following.native.check import reason_against_bits
from roundpipe.following.native.decoder import NativeDecoder, native_decoder
from roundpipe.ops import packed_attention
from sweeps import sweep

peft = pytest.importorskip("peft")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(name: str, dtype: torch.dtype = torch.float32, targets: Any = EVERY, **options: Any) -> Any:
    make = moe_models.make if name in moe_models.MODELS else dense_models.make
    config = peft.LoraConfig(r=3, target_modules=targets, **{"init_lora_weights": False, **options})
    return peft.get_peft_model(make(name, dtype), config)


def layers_of(model: Any) -> Any:
    return model.base_model.model.model.layers


@sweep(
    "name, dtype",
    ["llama", "llama biases", "mistral", "qwen3", "qwen3_moe mixed", "gpt_oss"],
    [torch.float32, torch.bfloat16],
    ids=str,
    together=1,
)
def test_bits_of_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    targets = EVERY[:4] if name in moe_models.MODELS else EVERY
    options = {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"q_proj": 2.5}, "lora_bias": name == "llama biases"}
    model = adapted(name, dtype, targets, **options)
    for layer in layers_of(model):
        decoder = native_decoder(layer, 0)
        assert isinstance(decoder, NativeDecoder), decoder
        attention = "eager" if "gpt" in name else "sdpa"
        assert reason_against_bits(decoder, attention, "grouped_mm") is None


@sweep("dtype, targets", [torch.float32, torch.bfloat16], [EVERY, ["q_proj", "down_proj"]], ids=str, together=1)
def test_models_have_the_plain_models_bits(dtype: torch.dtype, targets: list[str]) -> None:
    roundpipe.devices("virtual:2,debug")
    check_plain_bits(adapted("qwen3", dtype, targets), batch("padded"))


@sweep("task, dtype, kind", ["CAUSAL_LM", None], DTYPES, ["whole", "padded", "packed"], ids=str, together=1)
def test_the_parts_around_are_native_as_well(task: str | None, dtype: torch.dtype, kind: str) -> None:
    roundpipe.devices("virtual:2")
    packed_attention.register()
    for attention in ("sdpa", "sdpa_packed"):
        model = adapted("llama", dtype, EVERY, task_type=task)
        model.base_model.model.set_attn_implementation(attention)
        assert not wrap(copy.deepcopy(model)).layers_are_native.reasons_around
        native, python = native_and_python(model, batch(kind), microbatches=2)
        assert all(map(torch.equal, native, python))
        check_plain_bits(model, batch(kind))


def with_another_class(model: Any) -> None:
    model.__class__ = type("Mine", (type(model),), {})


AROUND: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "class": ({}, with_another_class, "the model is in a Mine"),
    "tuner": ({}, lambda model: with_another_class(model.base_model), "the model is in a Mine"),
    "hook": ({}, lambda model: model.register_forward_hook(lambda *_: None), r"PeftModelForCausalLM has hooks"),
    "head": ({"modules_to_save": ["lm_head"]}, lambda _: None, "it has a ModulesToSaveWrapper, not a Linear"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_else_is_around_a_model_runs_in_python(name: str) -> None:
    roundpipe.devices("virtual:1")
    options, change, expected = AROUND[name]
    model = adapted("llama", task_type="CAUSAL_LM", **options)
    change(model)
    wrapped = wrap(model)
    reasons = wrapped.layers_are_native.reasons_around
    assert expected in reasons["the part after the layers"], reasons
    assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)


def test_a_forward_of_pefts_that_is_replaced_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.devices("virtual:1")
    model = adapted("llama", task_type="CAUSAL_LM")
    wrapped = wrap(model, native=None)
    assert not wrapped.layers_are_native.reasons_around
    own = peft.PeftModelForCausalLM.forward
    monkeypatch.setattr(peft.PeftModelForCausalLM, "forward", lambda self, *a, **k: own(self, *a, **k))
    assert len(wrapped.layers_are_native.reasons_around) == 2
    model.disable_adapter_layers()
    assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)


def test_hooks_for_the_time_of_a_call_are_refused() -> None:
    """They would be those of another microbatch, or gone, when the layers run."""
    with pytest.raises(ValueError, match=r"registers hooks inside its layers, which run later, .*aLoRA"):
        wrap(adapted("llama", task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]), native=None)
    roundpipe.devices("virtual:2")
    model = adapted("llama", task_type="CAUSAL_LM").eval()
    wrapped = wrap(model, microbatches=3)
    given = {"input_ids": batch("whole")["input_ids"]}
    for names in (["default"] * 3, ["__base__"] * 3):
        with pytest.raises(ValueError, match=r"registers hooks inside its layers, .* for adapter_names"):
            wrapped(**given, adapter_names=names)
    assert torch.allclose(wrapped(**given).logits, model(**given, use_cache=False).logits, atol=1e-5)


def test_dropout_draws_the_same_numbers_also_in_chunks() -> None:
    roundpipe.devices("virtual:2")
    model = adapted("llama", lora_dropout=0.3).train()
    for chunk in (None, 3):
        options: dict[str, Any] = {"microbatches": 2, "name": "one name for the seeds", "mlp_chunk_tokens": chunk}
        native, python = native_and_python(model, batch("whole"), calls=2, **options)
        assert all(map(torch.equal, native, python))
        assert not torch.equal(native[0], native[1])


def two_adapters(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "two": ({}, two_adapters, r"self_attn.q_proj has the adapters \['default', 'other'\], of which"),
    "dora": ({"use_dora": True}, lambda _: None, r"self_attn.q_proj has another adapter than plain LoRA"),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers(), r"q_proj has its adapter disabled"),
    "merged": ({}, lambda model: model.merge_adapter(), r"self_attn.q_proj has a merged adapter"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_adapters_run_in_python(name: str) -> None:
    roundpipe.devices("virtual:1")
    options, change, expected = CHANGES[name]
    model = adapted("qwen3", **options)
    change(model)
    for parameter in model.parameters():
        parameter.requires_grad_()
    text = reason(model)
    assert re.search(expected, text), text


def test_adapters_that_change_later_count() -> None:
    """The scaling and the list of merged adapters, which PEFT changes in place."""
    roundpipe.devices("virtual:1")
    model = adapted("llama", targets=["q_proj", "up_proj"])
    wrapped = wrap(model, native=None)

    def check() -> None:
        assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)

    assert wrapped.layers_are_native
    check()
    before = wrapped(**batch("whole")).logits
    layers_of(model)[0].self_attn.q_proj.set_scale("default", 3.0)
    check()
    assert wrapped.layers_are_native and not torch.equal(wrapped(**batch("whole")).logits, before)
    layers_of(model)[1].mlp.up_proj.enable_adapters(False)
    check()
    assert "layer 1: mlp.up_proj has its adapter disabled" in str(wrapped.layers_are_native)


def test_adapters_may_come_after_wrapping() -> None:
    """And with them, the layers stay native."""
    roundpipe.devices("virtual:1")
    model = dense_models.make("qwen3")
    wrapped = wrap(model)
    before = wrapped(**batch("whole")).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    later = peft.get_peft_model(wrapped, config)
    logits = later(**batch("whole")).logits
    assert torch.equal(logits, model(**batch("whole"), use_cache=False).logits)
    assert wrapped.layers_are_native and not torch.equal(logits, before)


def test_a_copy_without_adapters_stays_native() -> None:
    roundpipe.devices("virtual:1")
    model = adapted("llama")
    assert wrap(copy.deepcopy(model)).layers_are_native
    assert wrap(model.merge_and_unload()).layers_are_native
