"""Models with experts in C++ programs: the bits of transformers' models and of their routers' losses, folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import roundpipe.ops.packed_attention  # noqa: F401  it makes "packed" known
from language_program import (
    Program,
    answer_to,
    batches,
    check_saved_folders,
    compare,
    expected,
    needs_program,
)
from sweeps import mostly_long

pytestmark = [needs_program, pytest.mark.usefixtures("one_torch_thread")]  # as the program has

QWEN3 = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "head_dim": 16,
    "sliding_window": 5,
}
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**QWEN3, "norm_topk_prob": True},
    "qwen3_moe, mixed": {
        **QWEN3,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_moe, all of the experts": {**QWEN3, "num_experts_per_tok": 6},
    "qwen3_moe, router loss": {**QWEN3, **LOSS, "mlp_only_layers": [1]},
    "gpt_oss": GPT_OSS,
    "gpt_oss, other fields": {
        **GPT_OSS,
        "head_dim": 10,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.05,
        "rms_norm_eps": 1e-3,
        "hidden_act": "gelu_new",  # which this class does not read
        "initial_context_length": 8,
    },
    "gpt_oss, one expert": {**GPT_OSS, "num_local_experts": 1, "num_experts_per_tok": 1},
    "gpt_oss, all of the experts": {**GPT_OSS, "num_experts_per_tok": 6, "head_dim": 6},
    "gpt_oss, experts without tokens": {**GPT_OSS, "num_local_experts": 64, "num_experts_per_tok": 1},
    "gpt_oss, router loss": {**GPT_OSS, **LOSS},
}
SHORT_IN_BF16 = ("qwen3_moe, router loss", "gpt_oss")
LONG = ("gpt_oss, one expert", "qwen3_moe, all of the experts", *list(CONFIGS)[1::2])


def cases() -> list[Any]:
    return [
        *(pytest.param(n, "float32", id=n, marks=[pytest.mark.long] * (n in LONG)) for n in CONFIGS),
        *(
            pytest.param(n, "bfloat16", id=f"{n}, bf16", marks=[pytest.mark.long] * (n not in SHORT_IN_BF16))
            for n in CONFIGS
        ),
    ]


def own_attention(name: str) -> str:
    """What transformers uses by default."""
    return "eager" if name.startswith("gpt_oss") else "sdpa"


def check(
    program: Program, model: Path, folder: Path, kinds: tuple[str, ...], dtype: str, attention: str, microbatches: int
) -> None:
    given = {"attention": attention} if attention == "packed" else {}  # otherwise the default
    for kind in kinds:
        batch = batches()[kind]
        save_file(batch, folder / kind)
        out = folder / f"{kind}.{attention}"
        said = program.run(model=model, dtype=dtype, microbatches=microbatches, batch=folder / kind, out=out, **given)
        assert said == "ok", said
        compare(out, expected(model, batch, dtype, attention, microbatches))


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_bits_of_transformers(
    name: str, dtype: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = ("plain", "padded") if name == "gpt_oss, router loss" else ("plain", "padded", "packed")
    check(program, folder(name), tmp_path, kinds, dtype, own_attention(name), 1)


@pytest.mark.parametrize(
    "name",
    mostly_long(
        ["qwen3_moe", "qwen3_moe, router loss", "gpt_oss", "gpt_oss, router loss"], "qwen3_moe", "gpt_oss, router loss"
    ),
)
def test_bits_of_microbatches_and_packed_attention(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    check(program, folder(name), tmp_path, ("plain", "padded"), "float32", own_attention(name), 2)
    check(program, folder(name), tmp_path, ("padded", "packed"), "float32", "packed", 2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss, router loss", "qwen3_moe, router loss"])
def test_bits_of_packed_attention_in_bf16(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    check(program, folder(name), tmp_path, ("plain", "padded", "packed"), "bfloat16", "packed", 1)


def test_fields_of_published_folders(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
    fields = {
        "rope_parameters": None,
        "rope_scaling": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0},
        "rope_theta": 150000,
        "layer_types": None,
        "experts_per_token": 2,
        "initial_context_length": 16,
        "torch_dtype": "float32",
    }
    assert answer_to(program, folder("gpt_oss"), tmp_path / "model", fields) == "ok"
    check(program, tmp_path / "model", tmp_path, ("plain",), "float32", "eager", 1)


def test_norms_of_gpt_oss_stay_fp32_in_fp16(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    check(program, folder("gpt_oss"), tmp_path, ("padded",), "float16", "eager", 1)
    assert program.run(model=folder("gpt_oss"), dtype="float16", save=tmp_path / "saved") == "ok"
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(folder("gpt_oss"), dtype="float16").state_dict()
    assert saved.keys() == theirs.keys()
    assert all(saved[n].dtype == t.dtype and torch.equal(saved[n], t) for n, t in theirs.items())
    assert saved["model.norm.weight"].dtype == torch.float32 and saved["lm_head.weight"].dtype == torch.float16


def test_collected_routers_see_whole_rows(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    batch = batches()["plain"]
    save_file(batch, tmp_path / "batch")
    job = {"model": folder("gpt_oss, router loss"), "batch": tmp_path / "batch", "out": tmp_path / "out"}
    said = program.run(**job, mlp_chunk=5, microbatches=1)
    assert said == "ok", said
    wanted = expected(folder("gpt_oss, router loss"), batch, "float32", "eager", 1)
    found = load_file(tmp_path / "out")
    assert torch.equal(found["loss"], wanted["loss"])
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items() if name.startswith("grad."))


@pytest.mark.parametrize("name", ["qwen3_moe, mixed", "gpt_oss"])
def test_a_saved_folder_is_the_model(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    check_saved_folders(program, folder(name), tmp_path)


def test_stacked_experts(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("qwen3_moe"), tmp_path / "stacked")
    tensors = load_file(tmp_path / "stacked" / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.gate_proj.weight" in tensors  # as transformers writes them
    model = AutoModelForCausalLM.from_pretrained(folder("qwen3_moe"))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "stacked" / "model.safetensors",
    )
    assert program.run(model=tmp_path / "stacked", save=tmp_path / "saved") == "ok"
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few experts": ("qwen3_moe", {"num_experts_per_tok": 8}, "'num_experts_per_tok': 8, expected at most the 6"),
    "two numbers of experts": (
        "qwen3_moe",
        {"num_experts": 16, "num_local_experts": 8},
        "'num_experts': 16, expected as many as num_local_experts, 8",
    ),
    "a loss of no routers": (
        "qwen3_moe",
        {"output_router_logits": True, "mlp_only_layers": [0, 1, 2]},
        "'output_router_logits': true, expected false, since no layer has experts",
    ),
    "mxfp4": (
        "gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        '\'quantization_config\': {"quant_method":"mxfp4"}, expected none, as quantised weights are not trained',
    ),
    "no window": ("gpt_oss", {"sliding_window": None}, "'sliding_window': null, expected an integer"),
    "a layer type": (
        "gpt_oss",
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "'layer_types': \"chunked_attention\", expected full_attention or sliding_attention",
    ),
    "fewer experts": ("gpt_oss", {"num_local_experts": 5}, "mlp.router.weight' of"),
    "no biases": ("gpt_oss", {"attention_bias": False}, "k_proj.bias', 'model.layers.0.self_attn.o_proj.bias'"),
    "an unknown field": ("gpt_oss", {"router_jitter": 0.1}, "the field 'router_jitter', which is not known"),
    "a limit": ("gpt_oss", {"swiglu_limit": "7"}, "'swiglu_limit': \"7\", expected a number"),
}


def test_refused(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    for name, (model, fields, wanted) in REFUSED.items():
        said = answer_to(program, folder(model), tmp_path / name, fields)
        assert said.startswith("mistake: [language model] ") and wanted in said, (name, said)
    said = program.run(model=folder("gpt_oss"), attention="sdpa")
    assert "the attention is sdpa, expected eager or packed for gpt_oss" in said, said
    for target in ("up_proj", "gate_up_proj", "experts", "router"):
        said = program.run(model=folder("gpt_oss"), lora=target, rank=2, alpha=2)
        assert f"the target '{target}' is no linear layer of a decoder layer of this gpt_oss" in said, said
        assert said.endswith("expected names such as q_proj, k_proj, v_proj, o_proj; experts take no adapters")
    for target in (
        "up_proj",
        "mlp.down_proj",
        "model.layers.0.mlp.up_proj",
        "all-linear",
    ):  # of layer 0 without experts
        said = program.run(model=folder("qwen3_moe, mixed"), lora=target, rank=2, alpha=2)
        assert f"the target '{target}' is no linear layer of a decoder layer of this qwen3_moe" in said, said
