"""Language models of C++ programs: the bits of transformers' models, folders in and out, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
}


SHORT_IN_BF16 = ("llama, tied, pad token", "yarn", "qwen2, some windows")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, "float32", id=name, marks=[pytest.mark.long] * (place % 2))
        for place, name in enumerate(CONFIGS)
    ]
    + [
        pytest.param(name, "bfloat16", id=f"{name}, bf16", marks=[] if name in SHORT_IN_BF16 else [pytest.mark.long])
        for name in CONFIGS
    ],
)
def test_bits_of_transformers(
    name: str, dtype: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for kind, batch in batches().items():
        save_file(batch, tmp_path / kind)
        out = tmp_path / f"{kind}.out"
        said = program.run(model=folder(name), dtype=dtype, batch=tmp_path / kind, out=out)
        assert said == "ok", said
        compare(out, expected(folder(name), batch, dtype, "sdpa", 1))


@pytest.mark.parametrize("name", mostly_long(["llama, wide heads", "mistral, window", "qwen3"], "mistral, window"))
def test_bits_of_microbatches_and_packed_attention(
    name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for kind, batch in batches().items():
        save_file(batch, tmp_path / kind)
        for attention in ("sdpa", "packed", "eager"):
            out = tmp_path / f"{kind}.{attention}"
            said = program.run(model=folder(name), attention=attention, microbatches=2, batch=tmp_path / kind, out=out)
            assert said == "ok", said
            compare(out, expected(folder(name), batch, "float32", attention, 2))


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


@pytest.mark.parametrize("name", ["llama, wide heads", "qwen3, tied"])
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
    "quantised": ({"quantization_config": {"bits": 4}}, "'quantization_config': {\"bits\":4}, expected none"),
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, program: Program, folder: Callable[[str], Path], tmp_path: Path) -> None:
    fields, wanted = REFUSED[name]
    said = answer_to(program, folder("llama, all heads"), tmp_path / "model", fields)
    assert said.startswith("mistake: [language model] ") and wanted in said, said


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
