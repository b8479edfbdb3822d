"""`from_pretrained(..., quantise=...)`: weights are encoded while they are read."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import causal_models
import roundpipe
from roundpipe.quantise import encode_weights
from roundpipe.quantise.modules import decoded_parameters, encodings_of
from sweeps import sweep

IDS = torch.randint(3, causal_models.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    causal_models.build("llama").to(torch.bfloat16).save_pretrained(path)
    return path


def adapters(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)


@sweep("name, format", ["llama", "qwen3_moe", "gpt_oss", "gemma2"], ["nf4", "nf4-double", "int8"], together=1)
def test_the_numbers_are_those_of_a_model_in_memory(name: str, format: str, tmp_path: Path) -> None:
    causal_models.build(name).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = roundpipe.from_pretrained(tmp_path, peft_config=adapters(), quantise=format)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    choice = encode_weights(plain, format)
    expected = dict(decoded_parameters(plain))
    found = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): values
        for name, values in decoded_parameters(loaded)
        if "lora_" not in name
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(encodings_of(loaded)) == len(choice.encoded) > 0


def test_it_trains_and_the_base_stays(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)  # of the adapters
    model = roundpipe.from_pretrained(folder, peft_config=adapters(), quantise="nf4").train()
    before = {name: values.clone() for name, values in decoded_parameters(model) if "lora_" not in name}
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(float(model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})))
        model.step(optimizer, is_async=False)
    model.synchronize()
    assert losses[-1] < losses[0]
    after = dict(decoded_parameters(model))
    assert all(torch.equal(after[name], values) for name, values in before.items())
    model.save_pretrained(tmp_path / "adapter")
    again = roundpipe.from_pretrained(tmp_path / "adapter", quantise="nf4")
    trained = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert all(torch.equal(dict(again.named_parameters())[name], value) for name, value in trained.items())


def test_kept_modules_stay(folder: Path) -> None:
    model = roundpipe.from_pretrained(folder, peft_config=adapters(), quantise="nf4", keep=["mlp"])
    assert not any(".mlp." in name for name in encodings_of(model))
    assert any("q_proj" in name for name in encodings_of(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantise": "nf3"}, "quantise is 'nf3', expected one of nf4, nf4-double, mxfp4, int8"),
        ({"quantise": "nf4", "peft_config": None}, "quantise is for frozen weights, and no adapter is given"),
        ({"quantise": "nf4", "frozen_weights": "mmap"}, "encodes into memory, and frozen_weights='mmap'"),
        ({"keep": ["mlp"]}, "keep is given without quantise"),
        ({"quantise": "nf4", "keep": "mlp"}, r"keep is 'mlp', expected a list of names, such as \['mlp'\]"),
        ({"quantise": "nf4", "keep": ["mpl"]}, "keep names 'mpl', which is no module of the model"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roundpipe.from_pretrained(folder, **{"peft_config": adapters(), **options})


def test_a_weight_that_is_not_finite_is_named(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight cannot be encoded: .*inf or NaN"):
        roundpipe.from_pretrained(tmp_path, peft_config=adapters(), quantise="nf4")


def test_merging_into_encoded_weights_is_an_error(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    encode_weights(model, "int8")
    adapted = peft.get_peft_model(model, adapters(init_lora_weights=False))
    for safe in (False, True):
        with pytest.raises(RuntimeError, match="a weight that is encoded was to be written to"):
            adapted.merge_and_unload(safe_merge=safe)
    weight = model.model.layers[0].mlp.up_proj.weight
    for write in (weight.zero_, lambda: weight.__setitem__(0, 1), lambda: setattr(weight, "data", weight + 1)):
        with pytest.raises(RuntimeError, match="was to be written to"):
            write()
    assert type(weight + 1) is type(weight[0]) is torch.Tensor
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_copies_and_casts(name: str) -> None:
    model = causal_models.build(name).to(torch.bfloat16)
    encode_weights(model, "nf4")
    expected = model(IDS).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    blank = causal_models.build(name, seed=5).to(torch.bfloat16)
    encode_weights(blank, "nf4")
    blank.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), blank, model.to(torch.bfloat16)):
        assert torch.equal(other(IDS).logits, expected)
    with pytest.raises(ValueError, match=r"decode to torch\.bfloat16 were to become torch.float32"):
        copy.deepcopy(model).float()
    assert {parameter.device.type for parameter in model.to("meta").parameters()} == {"meta"}
    with pytest.raises(ValueError, match="is encoded already"):
        encode_weights(model, "nf4")


def test_a_module_of_two_places_stays_one() -> None:
    shared = nn.Linear(64, 64)
    seen: list[int] = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    model = nn.Sequential(shared, nn.ReLU(), shared)
    decoded = nn.Linear(64, 64)
    encode_weights(model, "nf4")
    assert model[0] is model[2] is shared
    decoded.load_state_dict(dict(decoded_parameters(shared)))
    batch = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(batch), decoded(decoded(batch).relu()))
    assert len(seen) == 2
