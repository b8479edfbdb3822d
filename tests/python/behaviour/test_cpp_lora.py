"""LoRA adapters of C++ programs: the bits of PEFT, folders in and out, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from encoded_folders import eight_bits
from language_program import Program, batches, make_folder, needs_program
from roundpipe.export.quantised_folder import quantise_folder
from roundpipe.quantise import encode_weights
from roundpipe.quantise.modules import decoded_parameters

pytestmark = [needs_program, pytest.mark.usefixtures("one_torch_thread")]  # as the program has
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama"}, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "qwen2, all layers, rslora": (
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "qwen3, some names": (
        {"model_type": "qwen3", "head_dim": 18},
        {"r": 2, "lora_alpha": 2, "target_modules": ["mlp.up_proj", "model.layers.1.self_attn.o_proj"]},
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
        {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj"]},
    ),
    "gpt_oss": (
        {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
        {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    ),
}


def make_adapter(model: Path, folder: Path, options: dict[str, Any]) -> Path:
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**options))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    peft.save_pretrained(folder)
    return folder


def check_bits(
    peft: Any, batch: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor]:
    """The program found what `peft` computes. Returns the arguments of its forward, and its logits."""
    names = {"ids": "input_ids", "positions": "position_ids"}
    arguments: dict[str, Any] = {names.get(name, name): tensor for name, tensor in batch.items() if name != "labels"}
    arguments["use_cache"] = False
    with torch.no_grad():
        logits = peft(**arguments).logits
    loss = peft(**arguments, labels=batch["labels"]).loss
    loss.backward()
    assert torch.equal(found["logits"], logits) and torch.equal(found["loss"], loss.detach())
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in peft.named_parameters()
        if parameter.requires_grad
    }
    assert gradients and {f"grad.{name}" for name in gradients} == {name for name in found if name.startswith("grad.")}
    for name, gradient in gradients.items():
        assert gradient is not None and torch.equal(found[f"grad.{name}"], gradient), name
    return arguments, logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        ("qwen2, all layers, rslora", "float32"),
        ("qwen3, some names", "float32"),
        ("qwen3_moe", "float32"),
        ("gpt_oss", "bfloat16"),
        pytest.param("gpt_oss", "float32", marks=pytest.mark.long),
        pytest.param("llama", "float32", marks=pytest.mark.long),
        pytest.param("qwen2, all layers, rslora", "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3, some names", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_bits_of_peft(name: str, dtype: str, program: Program, tmp_path: Path) -> None:
    fields, options = CASES[name]
    model = make_folder(tmp_path / "model", fields)
    adapter = make_adapter(model, tmp_path / "adapter", options)
    batch = batches()["padded" if name == "gpt_oss" else "packed"]
    save_file(batch, tmp_path / "batch")
    job = {"batch": tmp_path / "batch", "out": tmp_path / "out", "save_adapter": tmp_path / "saved"}
    job |= {"save_merged": tmp_path / "merged"}
    said = program.run(model=model, dtype=dtype, adapter=adapter, **job)
    assert said == "ok", said
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype), adapter, is_trainable=True
    )
    arguments, logits = check_bits(peft, batch, load_file(tmp_path / "out"))

    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), tmp_path / "saved")
    assert again.peft_config["default"].use_rslora == bool(options.get("use_rslora"))
    assert again.peft_config["default"].r == options["r"]
    for (one, ours), (other, theirs) in zip(again.named_parameters(), peft.named_parameters(), strict=True):
        assert one == other and torch.equal(ours, theirs), one
    with torch.no_grad():
        assert torch.equal(again(**arguments).logits, logits)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype)
    for (one, ours), (other, theirs) in zip(
        merged.named_parameters(), peft.merge_and_unload().named_parameters(), strict=True
    ):
        assert one == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs), one


@pytest.mark.parametrize(
    ("name", "dtype", "format"),
    [
        ("llama", "bfloat16", "nf4-double"),
        ("qwen2, all layers, rslora", "float32", "nf4"),
        ("qwen3_moe", "float32", "int8"),
        ("gpt_oss", "bfloat16", "nf4"),
    ],
)
@pytest.mark.parametrize("stored", [False, True], ids=["encoded while loading", "encoded files"])
def test_bits_on_an_encoded_base(
    stored: bool, name: str, dtype: str, format: str, program: Program, tmp_path: Path
) -> None:
    fields, options = CASES[name]
    model = make_folder(tmp_path / "model", fields)
    adapter = make_adapter(model, tmp_path / "adapter", options)
    batch = batches()["padded" if name == "gpt_oss" else "packed"]
    save_file(batch, tmp_path / "batch")
    job = {"batch": tmp_path / "batch", "out": tmp_path / "out", "save_adapter": tmp_path / "saved"}
    if stored:
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
        base = quantise_folder(model, tmp_path / "base", format, keep=["layers.0"]).folder
        said = program.run(model=base, adapter=adapter, **job)
    else:
        said = program.run(model=model, dtype=dtype, adapter=adapter, quantise=format, keep="layers.0", **job)
    assert said == "ok", said
    encoded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    encode_weights(encoded, format, keep=["layers.0"])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    decoded = dict(decoded_parameters(encoded))
    assert any(not torch.equal(parameter, decoded[name]) for name, parameter in plain.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(decoded[name])
    check_bits(PeftModel.from_pretrained(plain, adapter, is_trainable=True), batch, load_file(tmp_path / "out"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bits_on_files_of_fp8(name: str, program: Program, tmp_path: Path) -> None:
    fields, options = CASES[name]
    model = make_folder(tmp_path / "model", fields)
    adapter = make_adapter(model, tmp_path / "adapter", options)
    save_file(batches()["packed"], tmp_path / "batch")
    codes = eight_bits(model, tmp_path / "base", None, torch.float32)
    job = {"batch": tmp_path / "batch", "out": tmp_path / "out"}
    said = program.run(model=tmp_path / "base", adapter=adapter, **job)
    assert said == "ok", said
    stored, plain = load_file(tmp_path / "base" / "model.safetensors"), load_file(model / "model.safetensors")
    decoded = {each: values.float() * stored[f"{each}_scale_inv"] for each, values in codes.items()}
    save_file(plain | decoded, model / "model.safetensors", {"format": "pt"})
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter, is_trainable=True)
    check_bits(peft, batches()["packed"], load_file(tmp_path / "out"))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"quantise": "nf4"}, "quantise is for frozen weights, expected adapters beside it"),
        ({"quantise": "nf5", "lora": "q_proj"}, "the format is 'nf5', expected one of nf4, nf4-double, mxfp4, int8"),
        ({"quantise": "nf4", "keep": "mpl", "lora": "q_proj"}, "keep names 'mpl', which is no module of the model"),
        ({"quantise": "nf4", "keep": "layers", "lora": "q_proj"}, "quantise leaves nothing to be encoded"),
        ({"quantise": "nf4", "lora": "q_proj", "save_merged": "x"}, "the model's weights are encoded, expected plain"),
    ],
)
def test_what_cannot_be_encoded_is_refused(job: dict[str, str], message: str, program: Program, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", CASES["llama"][0])
    said = program.run(model=model, rank="2", alpha="2", **job)
    assert said.startswith("mistake: ") and message in said, said


def test_new_adapters_add_nothing_at_first(program: Program, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", {"model_type": "llama"})
    save_file(batches()["plain"], tmp_path / "batch")
    job = {"model": model, "batch": tmp_path / "batch"}
    assert program.run(**job, out=tmp_path / "plain") == "ok"
    new = {"lora": ",".join(ATTENTION), "rank": 4, "alpha": 8, "save_adapter": tmp_path / "saved"}
    assert program.run(**job, **new, out=tmp_path / "adapted") == "ok"
    plain, adapted = load_file(tmp_path / "plain"), load_file(tmp_path / "adapted")
    assert torch.equal(plain["logits"], adapted["logits"])
    tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(tensors) == 3 * 4 * 2
    for name, tensor in tensors.items():
        if "lora_B" in name:
            assert not tensor.any() and adapted[f"grad.{name.removeprefix('base_model.model.')}"].any()
        else:  # as nn.Linear begins
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound and tensor.std() == pytest.approx(bound * 3**-0.5, rel=0.2)


def test_all_linear_layers(program: Program, tmp_path: Path) -> None:
    for name, modules in (("gpt_oss", 4), ("llama", 7)):
        model = make_folder(tmp_path / name, CASES[name][0])
        saved = tmp_path / f"{name} adapter"
        assert program.run(model=model, lora="all-linear", rank=2, alpha=2, save_adapter=saved) == "ok"
        assert program.run(model=model, adapter=saved) == "ok"
        ours = load_file(saved / "adapter_model.safetensors")
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), saved)
        theirs = {n.replace(".default", ""): p for n, p in peft.named_parameters() if "lora_" in n}
        assert len(ours) == 3 * modules * 2 and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n], tensor) for n, tensor in theirs.items())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, '\'peft_type\': "IA3", expected "LORA"'),
    "dropout": ({"lora_dropout": 2}, "'lora_dropout': 2, expected a number from 0 to 1"),
    "dora": ({"use_dora": True}, "'use_dora': true, expected false"),
    "biases": ({"bias": "all"}, '\'bias\': "all", expected "none"'),
    "patterns": ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern'"),
    "other modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
    "another beginning": ({"init_lora_weights": "pissa"}, "'init_lora_weights': \"pissa\""),
    "a pattern": ({"target_modules": ".*proj"}, "'target_modules': \".*proj\", expected a list"),
    "a target": ({"target_modules": ["lm_head"]}, "the target 'lm_head' is no linear layer of a decoder layer"),
    "an unknown field": ({"use_new": 3}, "the field 'use_new', which is not known"),
    "another rank": ({"r": 5}, "lora_A.weight' of"),
    "fewer targets": ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight"),
    "more targets": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "which adapter_config.json asks for"),
}


def test_refused(program: Program, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", {"model_type": "llama"})
    adapter = make_adapter(model, tmp_path / "adapter", CASES["llama"][1])
    for name, (changes, message) in REFUSED.items():
        other = tmp_path / name
        shutil.copytree(adapter, other)
        config = json.loads((other / "adapter_config.json").read_text()) | changes
        (other / "adapter_config.json").write_text(json.dumps(config))
        said = program.run(model=model, adapter=other)
        assert said.startswith("mistake: [l") and message in said, (name, said)
    said = program.run(model=model, adapter=adapter, save=tmp_path / "merged")
    wanted = "mistake: [language model] the model has adapters, expected none; call save_adapter or save_merged"
    assert said == wanted, said
    for saving in ("save_adapter", "save_merged"):
        said = program.run(model=model, **{saving: tmp_path / "none"})
        assert said == "mistake: [language model] the model has no adapters, expected them; call save"
    (adapter / "adapter_model.safetensors").unlink()
    assert "there is no adapter_model.safetensors in" in program.run(model=model, adapter=adapter)
