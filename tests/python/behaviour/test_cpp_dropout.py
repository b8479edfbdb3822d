"""Dropout in language models of C++ programs: the bits of transformers and PEFT, seeded as the engine seeds layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import roundpipe.ops.packed_attention  # noqa: F401  it makes "packed" known
from language_program import Program, batches, load, make_folder, needs_program
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

pytestmark = [needs_program, pytest.mark.usefixtures("one_torch_thread")]  # as the program has

MICROBATCHES = 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
}


def seeded_loop(model: Any, decoder: Any, batch: dict[str, torch.Tensor], seeds: torch.Tensor) -> torch.Tensor:
    """The loss of a plain loop over microbatches, with the engine's seed before each decoder layer."""
    current: list[int] = []

    def seed(layer: Any, _: object) -> None:
        torch.manual_seed(current[layer.self_attn.layer_idx + 1])  # the embedding comes first

    for layer in decoder.layers:
        layer.register_forward_pre_hook(seed)
    counted = int((batch["labels"][:, 1:] != -100).sum())
    names = {"ids": "input_ids", "positions": "position_ids"}
    losses = []
    for microbatch, rows in enumerate(torch.arange(len(batch["ids"])).tensor_split(MICROBATCHES)):
        current[:] = [seed % 2**64 for seed in seeds[microbatch].tolist()]
        part = {names.get(name, name): tensor[rows] for name, tensor in batch.items()}
        loss = model(**part, use_cache=False, num_items_in_batch=counted).loss
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def assert_dropout_acted(dropped: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Gradients, since a loss may hardly move: each trainable one of the attention's values has another value."""
    without = dict(plain.named_parameters())
    compared = [name for name, tensor in dropped.named_parameters() if "v_proj" in name and tensor.requires_grad]
    assert compared
    for name in compared:
        assert not torch.allclose(dropped.get_parameter(name).grad, without[name].grad, rtol=1e-3), name


@pytest.mark.parametrize(
    ("name", "kind", "attention"),
    [
        ("llama", "padded", "sdpa"),
        ("qwen2", "packed", "packed"),
        ("gpt_oss", "padded", "eager"),
        pytest.param("gpt_oss", "packed", "packed", marks=pytest.mark.long),
        pytest.param("qwen2", "packed", "sdpa", marks=pytest.mark.long),
        pytest.param("llama", "plain", "eager", marks=pytest.mark.long),
    ],
)
def test_attention_dropout(name: str, kind: str, attention: str, program: Program, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {**MODELS[name], "attention_dropout": 0.2})
    batch = batches()[kind]
    save_file(batch, tmp_path / "batch")
    job = {"model": folder, "attention": attention, "microbatches": MICROBATCHES}
    said = program.run(**job, batch=tmp_path / "batch", out=tmp_path / "out")
    assert said == "ok", said
    found = load_file(tmp_path / "out")
    model = load(folder, attn_implementation=attention)
    with torch.no_grad():  # without dropout
        arguments = {"input_ids": batch["ids"], "position_ids": batch.get("positions")}
        logits = model(**arguments, attention_mask=batch.get("attention_mask"), use_cache=False).logits
    torch.testing.assert_close(found["logits"], logits)
    loss = seeded_loop(model.train(), model.model, batch, found["seeds"])
    assert torch.equal(found["loss"], loss)
    for parameter, tensor in model.named_parameters():
        assert torch.equal(found[f"grad.{parameter}"], tensor.grad), parameter
    undropped = load(folder, attn_implementation=attention).eval()
    seeded_loop(undropped, undropped.model, batch, found["seeds"])
    assert_dropout_acted(model.model, undropped.model)


def test_adapter_dropout(program: Program, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {"model_type": "qwen3", "attention_dropout": 0.1})
    options = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), options).save_pretrained(tmp_path / "adapter")
    batch = batches()["padded"]
    save_file(batch, tmp_path / "batch")
    job = {"model": folder, "adapter": tmp_path / "adapter", "microbatches": MICROBATCHES}
    said = program.run(**job, batch=tmp_path / "batch", out=tmp_path / "out", save_adapter=tmp_path / "saved")
    assert said == "ok", said
    found = load_file(tmp_path / "out")
    model = PeftModel.from_pretrained(load(folder), tmp_path / "saved", is_trainable=True).train()
    assert model.peft_config["default"].lora_dropout == 0.3
    loss = seeded_loop(model, model.base_model.model.model, batch, found["seeds"])
    assert torch.equal(found["loss"], loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ours = found["grad." + name.removeprefix("base_model.model.").replace(".default", "")]
            assert torch.equal(ours, parameter.grad), name
    undropped = PeftModel.from_pretrained(load(folder), tmp_path / "saved", is_trainable=True).eval()
    seeded_loop(undropped, undropped.base_model.model.model, batch, found["seeds"])
    assert_dropout_acted(model, undropped)


def test_seeds_are_those_of_the_python_package(program: Program, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", MODELS["llama"])
    save_file(batches()["plain"], tmp_path / "batch")
    said = program.run(model=folder, seed=7, batch=tmp_path / "batch", out=tmp_path / "out", microbatches=MICROBATCHES)
    assert said == "ok", said
    torch.manual_seed(7)
    wrapped = wrap_model_to_roundpipe(
        AutoModelForCausalLM.from_pretrained(folder),
        name="language model",
        model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES),
    )
    seeds = load_file(tmp_path / "out")["seeds"]  # of call 2: one for the logits and one for the loss came before
    for microbatch in range(MICROBATCHES):
        for layer in range(1, 4):  # the decoder layers
            seed = wrapped.layer_seed(2, microbatch, layer)
            assert seed == seeds[microbatch, layer].item() % 2**64
