"""Language models of C++ programs, with experts and without: the bits of transformers' models and of their routers'
losses, folders in and out, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import roundpipe
import roundpipe.ops.packed_attention  # it makes "packed" known
from language_program import (
    TOKENS,
    Program,
    answer_to,
    batches,
    check_saved_folders,
    compare,
    expected,
    load,
    make_folder,
    needs_program,
)
from sweeps import mostly_long

pytestmark = [needs_program, pytest.mark.usefixtures("one_torch_thread")]  # as the program has

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
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
    "llama, wide heads": {"model_type": "llama", "head_dim": 24},
    "llama, tied, pad token": {"model_type": "llama", "tie_word_embeddings": True, "pad_token_id": 3},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "llama, all heads": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
    "llama3": {
        "model_type": "llama",
        "head_dim": 32,
        "rope_parameters": {**LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 32},
    },
    "yarn": {"model_type": "qwen3", "head_dim": 32, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    "yarn, all fields": {
        "model_type": "llama",
        "rope_parameters": {
            **YARN,
            "rope_theta": 300.0,
            "beta_fast": 8,
            "beta_slow": 2,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "mistral, window": {"model_type": "mistral", "sliding_window": 4},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2, some windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 18, "attention_bias": True},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
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


SHORT = (
    *list(CONFIGS)[:15:2],
    "qwen3_moe, mixed",
    "gpt_oss",
    "gpt_oss, experts without tokens",
    "gpt_oss, router loss",
)
SHORT_IN_BF16 = ("llama, tied, pad token", "yarn", "qwen2, some windows", "qwen3_moe, router loss", "gpt_oss")


def own_attention(name: str) -> str:
    """What transformers uses by default."""
    return "eager" if name.startswith("gpt_oss") else "sdpa"


def check(
    program: Program, model: Path, folder: Path, kinds: tuple[str, ...], dtype: str, attention: str, microbatches: int
) -> None:
    for kind in kinds:
        batch = batches()[kind]
        save_file(batch, folder / kind)
        out = folder / f"{kind}.{attention}"
        given: dict[str, Any] = {"attention": attention} if microbatches > 1 else {}  # otherwise the default
        job = {"model": model, "dtype": dtype, "microbatches": microbatches, "batch": folder / kind, "out": out}
        said = program.run(**job, **given)
        assert said == "ok", said
        compare(out, expected(model, batch, dtype, attention, microbatches))


def cases() -> list[Any]:
    short = {"float32": SHORT, "bfloat16": SHORT_IN_BF16}
    return [
        pytest.param(name, dtype, id=f"{name}, {dtype}", marks=[] if name in short[dtype] else [pytest.mark.long])
        for name in CONFIGS
        for dtype in short
    ]


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_bits_of_transformers(
    name: str, dtype: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = ("plain", "padded") if name == "gpt_oss, router loss" else ("plain", "padded", "packed")
    check(program, folder(name), tmp_path, kinds, dtype, own_attention(name), 1)


@pytest.mark.parametrize(
    "name",
    mostly_long(
        ["llama, wide heads", "mistral, window", "qwen3", "qwen3_moe", "gpt_oss", "gpt_oss, router loss"],
        *("mistral, window", "qwen3_moe", "gpt_oss, router loss"),
    ),
)
def test_bits_of_microbatches_and_packed_attention(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for attention in {"packed", "eager", own_attention(name)}:
        kinds = ("plain", "padded") if name.startswith("gpt") and attention == "eager" else ("padded", "packed")
        check(program, folder(name), tmp_path, kinds, "float32", attention, 2)


@pytest.mark.parametrize("name", ["qwen3", "llama, tied, pad token"])
def test_fast_arithmetic_has_the_bits_of_the_python_face(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    roundpipe.devices("virtual:1")
    batch = batches()["plain"]
    save_file(batch, tmp_path / "batch")
    found: list[dict[str, torch.Tensor]] = []
    for arithmetic in ("fast", "exact"):
        out = tmp_path / arithmetic
        said = program.run(
            model=folder(name),
            dtype="bfloat16",
            arithmetic=arithmetic,
            microbatches=2,
            batch=tmp_path / "batch",
            out=out,
        )
        assert said == "ok", said
        found.append(load_file(out))
    fast, exact = found
    model = load(folder(name), dtype="bfloat16", attn_implementation="sdpa").train()
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    wrapped = roundpipe.wrap_model_to_roundpipe(model, model_run_config=config, arithmetic="fast", native=True)
    counted = (batch["labels"][:, 1:] != -100).sum()
    arguments = {"input_ids": batch["ids"], "labels": batch["labels"], "num_items_in_batch": counted}
    loss = wrapped.forward_backward((), arguments)
    wrapped.synchronize()
    assert torch.equal(fast["loss"], loss.detach().cpu().reshape(()))
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(fast[f"grad.{parameter_name}"], parameter.grad), parameter_name
    assert not torch.equal(fast["grad.model.norm.weight"], exact["grad.model.norm.weight"])
    assert fast["loss"].item() == pytest.approx(exact["loss"].item(), rel=1e-2)


@pytest.mark.long
def test_chunks_of_a_loss_have_the_bytes_that_are_asked_for(program: Program, tmp_path: Path) -> None:
    model = make_folder(
        tmp_path / "model", {"model_type": "llama", "vocab_size": 40_000, "max_position_embeddings": 600}
    )
    ids = torch.randint(40_000, (1, 600), generator=torch.Generator().manual_seed(2))
    save_file({"ids": ids, "labels": ids.clone()}, tmp_path / "batch")

    def gradient(**options: int) -> torch.Tensor:
        out = tmp_path / "out"
        assert program.run(model=model, batch=tmp_path / "batch", out=out, **options) == "ok"
        found = load_file(out)["grad.lm_head.weight"].clone()
        out.unlink()
        return found

    # 64 MiB are 419 tokens, so 300 at a time; 1 MiB would be fewer than the least, 128, so 120 at a time.
    assert torch.equal(gradient(), gradient(loss_chunk=300))
    assert torch.equal(gradient(chunk_logit_bytes=2**20), gradient(loss_chunk=120))
    assert not torch.equal(gradient(), gradient(loss_chunk=120))


@pytest.mark.parametrize("name", ["llama, wide heads", "qwen3, tied", "qwen3_moe, mixed", "gpt_oss"])
def test_a_saved_folder_is_the_model(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    check_saved_folders(program, folder(name), tmp_path)
    source = folder(name)
    said = program.run(model=source, save=tmp_path / "float32")
    assert said.startswith("mistake: [language model] there is something at"), said
    assert program.run(model=tmp_path / "bfloat16", save=tmp_path / "float32", replace=1) == "ok"
    assert json.loads((tmp_path / "float32" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_tied_head_that_is_stored_has_to_be_the_embedding(program: Program, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", {"model_type": "qwen3", "tie_word_embeddings": True})
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, model / "model.safetensors")
    assert program.run(model=model) == "ok"
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors")
    said = program.run(model=model)
    assert said.startswith("mistake:") and "'lm_head.weight'" in said and "differs from the embedding" in said, said


def test_loading_makes_no_second_copy(program: Program, tmp_path: Path) -> None:
    small = make_folder(tmp_path / "small", {"model_type": "llama"})
    large = make_folder(tmp_path / "large", {"model_type": "llama", "vocab_size": 80_000, "hidden_size": 128})
    size = (large / "model.safetensors").stat().st_size
    assert size > 80e6
    assert program.run(model=small) == "ok"
    before = program.peak_memory()
    assert program.run(model=large) == "ok"
    assert program.peak_memory() - before < size + 25e6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"model_type": "gpt2"}, "'model_type': \"gpt2\", expected one of llama, mistral"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "'architectures'"),
    "an unknown field": ({"residual_multiplier": 0.5}, "the field 'residual_multiplier', which is not known"),
    "dropout": ({"attention_dropout": 1.5}, "'attention_dropout': 1.5, expected a number from 0 to 1"),
    "an activation": ({"hidden_act": "gelu_new"}, "'hidden_act': \"gelu_new\""),
    "rope type": ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "'rope_type': \"longrope\""),
    "rope field": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "'mrope_section'"),
    "older rope field": ({"rope_scaling": {"type": "linear"}}, "'rope_scaling' has no 'factor'"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor': 0.5, expected 1.0"),
    "not causal": ({"is_causal": False}, "'is_causal': false, expected true"),
    "a window": ({"sliding_window": 4}, "the field 'sliding_window'"),
    "layer types": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "'layer_types': \"linear_attention\"",
    ),
    "a window that is off": (
        {"model_type": "qwen2", "sliding_window": 4, "layer_types": ["sliding_attention"] * 3},
        "'layer_types': \"sliding_attention\", expected full_attention",
    ),
    "odd heads": ({"head_dim": 7}, "'head_dim': 7, expected an even number"),
    "groups": ({"num_key_value_heads": 3}, "'num_key_value_heads': 3, expected a divisor of the 4 heads"),
    "a pad token": ({"pad_token_id": 61}, "'pad_token_id': 61, expected a token of the vocabulary"),
    "a missing size": ({"hidden_size": None}, "has no 'hidden_size'"),
    "a dtype": ({"dtype": "float8"}, "'dtype' is 'float8', expected float32"),
    "a wider layer": ({"intermediate_size": 57}, "mlp.gate_proj.weight' of"),
    "more layers": ({"num_hidden_layers": 4}, "lacks 'model.layers.3.self_attn.q_proj.weight'"),
    "fewer layers": ({"num_hidden_layers": 2}, "holds 'model.layers.2.input_layernorm.weight'"),
    "biases": ({"attention_bias": True}, "lacks 'model.layers.0.self_attn.q_proj.bias'"),
    "tied": ({"tie_word_embeddings": True}, "holds 'lm_head.weight', which config.json does not ask for, and"),
}
REFUSED_MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
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
        "the encoded weights of",
    ),
    "no window": ("gpt_oss", {"sliding_window": None}, "'sliding_window': null, expected an integer"),
    "a layer type": (
        "gpt_oss",
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "'layer_types': \"chunked_attention\", expected full_attention or sliding_attention",
    ),
    "fewer experts": ("gpt_oss", {"num_local_experts": 5}, "mlp.router.weight' of"),
    "no biases": ("gpt_oss", {"attention_bias": False}, "k_proj.bias', 'model.layers.0.self_attn.o_proj.bias'"),
    "another unknown field": ("gpt_oss", {"router_jitter": 0.1}, "the field 'router_jitter', which is not known"),
    "a limit": ("gpt_oss", {"swiglu_limit": "7"}, "'swiglu_limit': \"7\", expected a number"),
}


def test_refused(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    dense = {name: ("llama, all heads", *refused) for name, refused in REFUSED.items()}
    for name, (model, fields, wanted) in (dense | REFUSED_MIXTURES).items():
        said = answer_to(program, folder(model), tmp_path / name, fields)
        assert said.startswith("mistake: [language model] ") and wanted in said, (name, said)


def test_adapters_of_experts_are_refused(program: Program, folder: Callable[[str], Path]) -> None:
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


def test_batches_that_do_not_fit(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = batches()["plain"]
    holes = torch.ones_like(plain["ids"])
    holes[0, 4] = 0
    wrong = {
        "the ids hold 61, expected 0 to 60": {"ids": plain["ids"].clone().fill_(61)},
        "the labels hold -1": {"labels": plain["labels"].clone().fill_(-1)},
        "the labels have the shape": {"labels": plain["labels"][:2].clone()},
        "no label counts": {"labels": plain["labels"].clone().fill_(-100)},
        "the positions hold 64, expected 0 to 63": {"positions": torch.arange(TOKENS)[None] + 53},
        "the rows have 68 tokens": {name: tensor.repeat(1, 17)[:, :68] for name, tensor in plain.items()},
        "other numbers than 0 and 1": {"attention_mask": holes * 2},
        "padding between its tokens": {"attention_mask": holes},
    }
    for message, changes in wrong.items():
        save_file({name: tensor.contiguous() for name, tensor in {**plain, **changes}.items()}, tmp_path / "batch")
        job = {"model": folder("qwen3"), "batch": tmp_path / "batch", "out": tmp_path / "out"}
        said = program.run(attention="packed", **job)
        assert said.startswith("mistake: [") and message in said, said


def test_a_model_that_was_moved_from(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    save_file(batches()["plain"], tmp_path / "batch")
    uses: list[dict[str, Any]] = [{"batch": tmp_path / "batch", "out": tmp_path / "out"}]
    uses += [{name: tmp_path / name} for name in ("save", "save_merged", "save_adapter")]
    for use in uses:
        said = program.run(model=folder("qwen3"), moved=1, **use)
        assert said.startswith("mistake: [language model] this language model was moved from"), (use, said)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_damaged_folders(program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    said = program.run(model=tmp_path)
    assert said.startswith("mistake: [language model] there is no ") and "config.json" in said, said
    model = tmp_path / "model"
    shutil.copytree(folder("qwen3"), model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-4])
    assert program.run(model=model).startswith("error: "), "a cut file was taken"
    (model / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in program.run(model=model)
    tensors = load_file(folder("qwen3") / "model.safetensors")
    save_file(tensors, model / "one.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "one.safetensors") | {"more": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    said = program.run(model=model)
    assert said.startswith("error: ") and "says that 'more' is in one.safetensors, which has it not" in said, said
    del index["weight_map"]["more"]
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert program.run(model=model) == "ok"


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
