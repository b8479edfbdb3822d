"""Layers with experts: transformers' bits for each of its ways to compute them, and for what its routers return."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from test_native_models import (
    DTYPES,
    KINDS,
    batch,
    check_plain_bits,
    native_and_python,
    run_plain,
    taken_by_a_step,
    wrap,
)
from test_native_reasons import reason
from transformers.integrations import moe

import roundpipe
from gradients import check_gradients
from moe_models import MODELS, attention_of, make
from roundpipe import _core
from roundpipe.following.native.check import reason_against_bits
from roundpipe.following.native.decoder import NativeDecoder, config_of, native_decoder
from roundpipe.ops import packed_attention
from roundpipe.ops.token_wise import TokenWise, in_chunks
from sweeps import sweep

EXPERTS = ["eager", "grouped_mm", "batched_mm"]


def decoder_of(layer: Any) -> NativeDecoder:
    decoder = native_decoder(layer, 0)
    assert isinstance(decoder, NativeDecoder), decoder
    return decoder


@sweep("name,experts,dtype", MODELS, EXPERTS, [*DTYPES, torch.float16], ids=str)
def test_bits_of_values_and_gradients(name: str, experts: str, dtype: torch.dtype) -> None:
    # torch's grouped products take rows of whole 16 bytes only.
    size = "intermediate_size" if "gpt" in name else "moe_intermediate_size"
    model = make(name, dtype, experts_implementation=experts, **({} if experts == "grouped_mm" else {size: 7}))
    attentions = {model.config._attn_implementation, "packed"}
    for layer, attention in itertools.product(model.model.layers, attentions):
        model.config._attn_implementation = attention
        assert reason_against_bits(decoder_of(layer), attention, experts) is None


@pytest.mark.parametrize("experts", EXPERTS)
def test_chunks_have_the_operators_bits(experts: str) -> None:
    layer = make("qwen3_moe", experts_implementation=experts).model.layers[0]
    decoder, weights = decoder_of(layer), list(layer.parameters())
    hidden, table = torch.randn(2, 7, 24), torch.rand(1, 7, 8)
    with in_chunks(layer, (TokenWise("mlp", None),), 3):
        expected = layer(hidden, position_embeddings=(table, table))
    native = _core.decode(
        config_of(layer), decoder.names, weights, hidden, table, table, None, "sdpa", 3, experts=experts
    )
    assert torch.equal(native, expected)
    gradients = [torch.autograd.grad(output.square().sum(), weights) for output in (native, expected)]
    assert all(map(torch.equal, *gradients))


@sweep(
    "name,attention,experts,dtype,kind,logits,devices",
    MODELS,
    ["eager", "sdpa", "sdpa_packed"],
    EXPERTS,
    DTYPES,
    KINDS,
    [False, True],
    [1, 2, 3],
    ids=str,
    together=1,
)
def test_one_microbatch_has_the_plain_models_bits(
    name: str, attention: str, experts: str, dtype: torch.dtype, kind: str, logits: bool, devices: int
) -> None:
    roundpipe.devices(f"virtual:{devices},debug")
    packed_attention.register()
    options = {"attn_implementation": attention_of(name, attention), "experts_implementation": experts}
    check_plain_bits(make(name, dtype, **options, output_router_logits=logits), batch(kind))


def test_router_logits_reach_the_end_of_the_model() -> None:
    """Also past a dense layer, and past a layer that runs in Python."""
    roundpipe.devices("virtual:2")
    model = make("qwen3_moe mixed", num_hidden_layers=4, output_router_logits=True, router_aux_loss_coef=0.5)
    for change in (None, "Python"):
        mine = copy.deepcopy(model)
        expected, theirs = run_plain(copy.deepcopy(model), batch("padded"))
        wrapped = wrap(mine)
        if change:
            mine.model.layers[2].self_attn.register_forward_hook(lambda *_: None)
            assert "layer 2: self_attn has hooks" in str(wrapped.layers_are_native)
        outputs = wrapped(**batch("padded"))
        outputs.loss.backward()
        wrapped.synchronize()
        assert len(outputs.router_logits) == 3
        assert all(map(torch.equal, outputs.router_logits, expected.router_logits))
        assert torch.equal(outputs.aux_loss, expected.aux_loss) and torch.equal(outputs.loss, expected.loss)
        check_gradients({name: p.grad for name, p in mine.named_parameters() if p.grad is not None}, theirs, exact=True)


@pytest.mark.parametrize(
    ("name", "logits"),
    [pytest.param("qwen3_moe", logits, marks=pytest.mark.long) for logits in (False, True)] + [("gpt_oss", True)],
)
def test_layers_do_not_take_the_interpreter_lock(name: str, logits: bool) -> None:
    def taken(layers: int, native: bool) -> int:
        model = make(name, num_hidden_layers=layers, output_router_logits=logits)
        return taken_by_a_step(model, layers, native)

    roundpipe.devices("virtual:1")
    more_native, more_python = (taken(6, native) - taken(2, native) for native in (True, False))
    assert more_python - more_native >= 4 * 2 * 2  # four layers, two microbatches, forward and recompute


def test_frozen_experts_and_routers() -> None:
    roundpipe.devices("virtual:2")
    for frozen in ("experts", "mlp.gate"):
        model = make("qwen3_moe", experts_implementation="eager")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        check_plain_bits(model, batch("whole"))


def test_dropout_and_norms_in_float() -> None:
    """As from_pretrained keeps GPT-OSS's norms."""
    roundpipe.devices("virtual:2")
    model = make("gpt_oss", torch.bfloat16, attention_dropout=0.3).train()
    for module in model.modules():
        if type(module).__name__ == "GptOssRMSNorm":
            module.float()
    native, python = native_and_python(model, batch("whole"), calls=2, microbatches=2, name="one name for the seeds")
    assert all(map(torch.equal, native, python))
    assert not torch.equal(native[0], native[1])


def test_attention_without_sinks_is_not_native() -> None:
    layer = make("gpt_oss").model.layers[0]
    hidden, table = torch.randn(2, 5, 24), torch.rand(1, 5, 4)
    with pytest.raises(ValueError, match=r"torch's attention takes no sinks; expected eager, or packed with a mask"):
        _core.decode(
            config_of(layer),
            decoder_of(layer).names,
            list(layer.parameters()),
            hidden,
            table,
            table,
            None,
            "sdpa",
        )


def test_what_has_no_native_form_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.devices("virtual:1")
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "another", lambda *a: moe.batched_mm_experts_forward(*a))
    model = make("qwen3_moe")
    model.config._experts_implementation = "another"
    assert re.search(r"the experts implementation 'another' has no native form", reason(model))
    model = make("qwen3_moe")
    model.model.layers[1].mlp.experts.is_transposed = None
    assert re.search(r"layer 1: mlp.experts.is_transposed is None, not False", reason(model))
    model = make("gpt_oss")
    model.model.layers[1].mlp.experts.limit = torch.tensor(7.0)
    assert re.search(r"layer 1: mlp.experts.limit is tensor\(7.\), not a number", reason(model))
    model = make("qwen3_moe")
    model.model.layers[0].mlp.gate.top_k = 3  # the numbers may differ from the config's
    assert wrap(model).layers_are_native


def test_the_implementation_may_change_later() -> None:
    roundpipe.devices("virtual:1")
    model = make("qwen3_moe")
    wrapped = wrap(model)
    for experts in ("eager", "grouped_mm", "batched_mm"):
        model.config._experts_implementation = experts
        assert wrapped.layers_are_native
        assert torch.equal(wrapped(**batch("padded")).logits, model(**batch("padded"), use_cache=False).logits)


def test_replaced_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.devices("virtual:1")
    model = make("qwen3_moe")
    wrapped = wrap(model)
    plain = moe._grouped_linear
    monkeypatch.setattr(moe, "_grouped_linear", lambda *args, **options: plain(*args, **options) * 2)
    assert "transformers.integrations.moe._grouped_linear has been replaced" in str(wrapped.layers_are_native)
    assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)
