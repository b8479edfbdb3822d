"""Adapters on an encoded base train like adapters on the decoded one in plain PyTorch, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import causal_models
import roundpipe
from causal_models import BATCHES
from gradients import check_gradients, gradients
from roundpipe import RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.following.native.check import reason_against_bits
from roundpipe.following.native.decoder import NativeDecoder, native_decoder
from roundpipe.quantise import encode_weights
from roundpipe.quantise.linear import EncodedLinear
from roundpipe.quantise.modules import decoded_parameters, encodings_of
from roundpipe.quantise.stacked import EncodedStacks
from sweeps import sweep

WITH_EXPERTS = ["qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3", "qwen3_next"]
NATIVE = ["llama", "qwen3", "qwen3_moe", "gpt_oss"]
NAMES = ["llama", "qwen3", "gemma2", "phi", *WITH_EXPERTS]


def decoded(name: str, encoded: nn.Module) -> Any:
    """The same model with the decoded numbers as plain weights."""
    plain = causal_models.build(name)
    values = dict(decoded_parameters(encoded))
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            parameter.copy_(values[path])
    return plain


def pair(name: str, format: str, grain: Any = None, **options: Any) -> tuple[Any, Any]:
    """(adapters on the encoded model in the pipeline, the same on the decoded one with peft alone)."""
    encoded = causal_models.build(name)
    encode_weights(encoded, format)
    plain = peft.get_peft_model(decoded(name, encoded), adapters(name, **options))
    config = RoundPipeRunConfig(num_microbatch=1, recompute_grain=grain)
    model = wrap_model_to_roundpipe(peft.get_peft_model(encoded, adapters(name, **options)), model_run_config=config)
    generator = torch.Generator().manual_seed(2)
    theirs = dict(plain.named_parameters())
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:  # B begins at zero
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            theirs[path].data.copy_(parameter)
    return model, plain


def adapters(name: str, **options: Any) -> peft.LoraConfig:
    # "all-linear" would take experts as well.
    targets = ["q_proj", "v_proj", "o_proj", "kv_b_proj"] if name in WITH_EXPERTS else "all-linear"
    return peft.LoraConfig(r=3, task_type="CAUSAL_LM", target_modules=targets, **options)


def check_bits(model: Any, plain: Any, batch: dict[str, Any], **options: Any) -> None:
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    loss = model.forward_backward(input_kwargs=batch, **options)
    model.synchronize()
    assert torch.equal(loss, expected.detach())
    mine = gradients(model)
    assert mine.keys() == gradients(plain).keys()
    check_gradients(mine, gradients(plain), exact=True)
    assert encodings_of(model)


@sweep("name, format, devices, grain, batch", NAMES, ["nf4", "int8"], [1, 4], ["stage", "layer"], BATCHES, together=1)
def test_bits_of_the_decoded_base(name: str, format: str, devices: int, grain: Any, batch: str) -> None:
    roundpipe.devices(f"virtual:{devices},debug")
    check_bits(*pair(name, format, grain), BATCHES[batch]())


@sweep("name, grain", ["llama", "gemma2", "qwen3_moe", "deepseek_v3"], ["stage", "layer"], together=1)
def test_no_graph_of_a_stage_needs_what_the_next_layer_decodes(name: str, grain: Any) -> None:
    """Freed memory of these devices is NaN. A stage has all decoder layers, native ones or those of Python."""
    roundpipe.devices("virtual:2,debug")
    model, plain = pair(name, "nf4", grain)
    last = model.num_layers - 1
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan = [range(last)]
    plan.bwd_plan = [range(last, last + 1), range(last)]
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan, recompute_grain=grain)
    check_bits(model, plain, BATCHES["padded"](), run_config=config)
    backward = [job.layers for job in model.last_plan().jobs if job.phase == "backward"]
    assert len(backward) == (1 if grain == "stage" else last - 1)
    assert {layer for job in backward for layer in range(job.first, job.last)} == set(range(1, last))


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"bias": "lora_only"}, {"use_rslora": True}], ids=str)
def test_kinds_of_adapters(kind: dict[str, Any]) -> None:
    roundpipe.devices("virtual:2,debug")
    check_bits(*pair("qwen3", "nf4", **kind), BATCHES["padded"]())


@sweep("name, format, dtype", NATIVE, _core.format_names(), [torch.float32, torch.bfloat16], ids=str, together=1)
def test_layers_are_native_with_the_same_bits(name: str, format: str, dtype: torch.dtype) -> None:
    encoded = causal_models.build(name).to(dtype)
    encode_weights(encoded, format)
    model = peft.get_peft_model(encoded, adapters(name))
    decoder = native_decoder(model.base_model.model.model.layers[1], 1)
    assert isinstance(decoder, NativeDecoder), decoder
    assert decoder.encodings
    for experts in ("eager", "grouped_mm", "batched_mm") if name in WITH_EXPERTS else (None,):
        encoded.set_experts_implementation(experts) if experts else None
        assert reason_against_bits(decoder, "eager" if name == "gpt_oss" else "sdpa", experts) is None
    assert not wrap_model_to_roundpipe(model).layers_are_native.reasons


def test_the_stacked_experts_of_every_layer_are_encoded() -> None:
    model = causal_models.build("qwen3_moe")
    choice = encode_weights(model, "nf4")
    assert {name for name in choice.encoded if "experts" in name} == {
        f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(3) for part in ("gate_up", "down")
    }
    assert choice.kept["lm_head.weight"] == "the head"
    assert "model.layers.0.mlp.gate.weight" in choice.kept
    kinds = {type(module).__mro__[1] for module in model.modules()}
    assert EncodedStacks in kinds and any(isinstance(module, EncodedLinear) for module in model.modules())


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[quantise\] the format is 'nf5', expected one of nf4, "):
        encode_weights(causal_models.build("llama"), "nf5")
    with pytest.raises(ValueError, match="keep names 'q_porj', which is no module"):
        encode_weights(causal_models.build("llama"), "nf4", keep=["q_porj"])
    with pytest.raises(ValueError, match="nothing can be encoded in modules of Conv1D, Embedding, LayerNorm, Linear"):
        encode_weights(causal_models.build("gpt2"), "nf4")
    broken = causal_models.build("llama")
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: .* inf or NaN"):
        encode_weights(broken, "nf4")


def test_keep_names_modules() -> None:
    model = causal_models.build("llama")
    choice = encode_weights(model, "nf4", keep=["down_proj", "model.layers.0"])
    assert "model.layers.1.mlp.up_proj.weight" in choice.encoded
    assert choice.kept["model.layers.1.mlp.down_proj.weight"] == "in keep"
    assert choice.kept["model.layers.0.self_attn.q_proj.weight"] == "in keep"


def test_adapters_on_encoded_experts_are_refused(tmp_path: Path) -> None:
    model = causal_models.build("qwen3_moe")
    encode_weights(model, "int8")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **targets))
    with pytest.raises(ValueError, match=r"target_parameters of PEFT names .*, and .*_proj is encoded"):
        wrap_model_to_roundpipe(adapted)
    causal_models.build("qwen3_moe").save_pretrained(tmp_path)
    everything = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
    with pytest.warns(UserWarning, match="'all-linear' leaves out the experts"):
        roundpipe.from_pretrained(tmp_path, peft_config=everything, quantise="nf4")
    kept = roundpipe.from_pretrained(tmp_path, peft_config=everything, quantise="nf4", keep=["experts"])
    assert not [name for name in encodings_of(kept) if "experts" in name]
