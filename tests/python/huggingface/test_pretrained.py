"""`from_pretrained`: what it loads, what it refuses, and that what is saved is what plain transformers loads."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

import roundpipe
from roundpipe import optim
from tiny_chat import tiny_llama

WHOLE = roundpipe.RoundPipeRunConfig(num_microbatch=1)
IDS = torch.randint(1, 260, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    tiny_llama(num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """One of its own, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def lora(**options: Any) -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **options)


def step(model: Any) -> None:
    optimizer = optim.AdamW(model, lr=1e-2)
    model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
    model.step(optimizer, is_async=False)
    model.synchronize()


def logits(model: Any) -> torch.Tensor:
    """Row by row, since rows that are computed together may have other bits."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=row).logits for row in IDS.split(1)])


def test_a_folder_is_loaded_trained_and_saved(saved: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved)
    model = roundpipe.from_pretrained(saved, name="mine")
    assert torch.equal(logits(model), logits(plain))
    step(model)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(logits(again), logits(plain))
    assert torch.equal(logits(again), logits(model))


def test_shards_and_stored_dtype(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert roundpipe.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert roundpipe.from_pretrained(str(tmp_path), dtype=torch.float32).dtype == torch.float32


def test_adapters_are_put_in_saved_and_trained_further(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = roundpipe.from_pretrained(saved, peft_config=lora(r=4, init_lora_weights=False))
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    step(model)
    model.save_pretrained(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}

    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), tmp_path / "adapter")
    assert torch.equal(logits(plain), logits(model))
    again = roundpipe.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    adapters = sum(p.numel() for name, p in plain.named_parameters() if "lora" in name)
    assert again.get_nb_trainable_parameters()[0] == adapters
    step(again)
    assert not torch.equal(logits(again), logits(plain))
    for name, value in again.state_dict().items():
        assert name not in frozen or torch.equal(value, frozen[name])


@pytest.mark.parametrize("adapters", [False, True])
def test_the_model_comes_in_eval_mode(saved: Path, adapters: bool) -> None:
    model = roundpipe.from_pretrained(saved, **({"peft_config": lora()} if adapters else {}))
    assert not any(module.training for module in model.modules())
    with pytest.warns(UserWarning, match=r"call model\.train\(\)"):
        model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eval mode")
        model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})


def test_an_adapter_and_peft_config_together_are_refused(saved: Path, tmp_path: Path) -> None:
    roundpipe.from_pretrained(saved, peft_config=lora(r=4)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] .*adapter is a PEFT adapter and peft_config was given"):
        roundpipe.from_pretrained(tmp_path / "adapter", peft_config=lora(r=4))
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] .*adapter_config.json names no base model, expected"):
        roundpipe.from_pretrained(tmp_path / "adapter")


def test_an_adapter_that_is_a_pickle_is_refused(saved: Path, tmp_path: Path) -> None:
    roundpipe.from_pretrained(saved, peft_config=lora(r=4)).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    assert torch.equal(logits(roundpipe.from_pretrained(file.parent)), logits(roundpipe.from_pretrained(saved)))
    file.unlink()
    with pytest.raises(ValueError, match=r"only adapter_model\.bin, a pickle.*save_pretrained\('"):
        roundpipe.from_pretrained(file.parent)


def test_adapters_without_peft(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lora(r=4)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] adapters need peft.*roundpipe-engine\[lora\]"):
        roundpipe.from_pretrained(saved, peft_config=config)


# --- what is refused ---


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roundpipe.from_pretrained(folder)


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", r"^\[from_pretrained\] .*none is not a folder, expected one that save_pretrained wrote")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"^\[from_pretrained\] .*model has no config.json, expected")


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, r"^\[from_pretrained\] .*model cannot be loaded: ")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"^\[checkpoint\] .*model holds no weights, expected model.safetensors")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, rf"^\[checkpoint\] .* into '{shard.name}', which is not in .*fetch the missing shard")


def test_pointer_of_git_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, r"^\[checkpoint\] .*model.safetensors is a pointer of Git LFS, .*git lfs pull")


def test_file_that_was_cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    refused(folder, r"^\[checkpoint\] .*model.safetensors is damaged: it has \d+ bytes where its header")


def test_unknown_kind_of_model(folder: Path) -> None:
    rewrite_config(folder, model_type="nosuch")
    refused(folder, r"^\[from_pretrained\] .*model cannot be loaded: .*nosuch")


def test_kind_of_model_that_is_no_causal_language_model(folder: Path) -> None:
    rewrite_config(folder, model_type="vit", architectures=["ViTModel"])
    refused(folder, r"^\[from_pretrained\] .*model cannot be loaded: ")


def test_missing_weights_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(
        folder,
        r"^\[from_pretrained\] weights of LlamaForCausalLM are not in its files \(2\): "
        r"model.layers.1.mlp.up_proj.weight, model.norm.weight; expected every weight in .*start at random",
    )


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(
        folder,
        r"^\[from_pretrained\] weights of \w+ have another shape there \(1\): "
        r"model.norm.weight \(32,\) instead of \(64,\);",
    )


def add_tensors(folder: Path, **more: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})


def test_weights_without_a_place_are_named(folder: Path) -> None:
    add_tensors(folder, **{"more.weight": torch.ones(2), "model.layers.2.mlp.up_proj.weight": torch.ones(2)})
    refused(
        folder,
        r"^\[from_pretrained\] .* holds 2 tensors that LlamaForCausalLM has no place for: "
        r"model.layers.2.mlp.up_proj.weight, more.weight; expected .*extra_tensors='ignore' loads the model",
    )
    model = roundpipe.from_pretrained(folder, extra_tensors="ignore")
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(folder)))
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] extra_tensors is 'keep', expected"):
        roundpipe.from_pretrained(folder, extra_tensors="keep")  # type: ignore[arg-type]


def test_left_overs_that_the_model_declares_are_no_extra_tensors(folder: Path) -> None:
    add_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    roundpipe.from_pretrained(folder)


def test_both_of_two_tied_weights_in_the_files(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(tmp_path, **{"lm_head.weight": embedding.clone()})
    model = roundpipe.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config_that_is_a_pointer(folder: Path) -> None:
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, r"^\[checkpoint\] .*config.json is a pointer of Git LFS, .*git lfs pull")


def test_options_go_where_they_belong(saved: Path) -> None:
    model = roundpipe.from_pretrained(saved, check_loss=False, loss_chunk_tokens=7, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"^\[wrap_model_to_roundpipe\] loss_chunk_tokens is 0, expected"):
        roundpipe.from_pretrained(saved, loss_chunk_tokens=0)
    with pytest.raises((TypeError, ValueError), match="no_such_option"):
        roundpipe.from_pretrained(saved, no_such_option=1)


def test_other_kinds_of_models_are_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds a BertForMaskedLM.*BertForMaskedLM\.from_pretrained.*wrap_model_to"):
        roundpipe.from_pretrained(tmp_path)


def test_a_model_that_scores_rows(tmp_path: Path) -> None:
    """Of a causal model's files, all but the head, which starts at torch's seed; of its own files, all of it."""
    plain = tiny_llama()
    plain.save_pretrained(tmp_path / "causal")
    torch.manual_seed(5)
    options = {"num_labels": 3, "pad_token_id": 1}
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", **options)
    torch.manual_seed(5)
    model = roundpipe.from_pretrained(tmp_path / "causal", num_labels=3, pad_token_id=1, model_run_config=WHOLE)
    ids = torch.randint(2, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, 6:] = 1
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "scores")
    again = roundpipe.from_pretrained(tmp_path / "scores", num_labels=3)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.state_dict().items())
    with pytest.raises(ValueError, match=r"num_labels is 0, expected at least 1"):
        roundpipe.from_pretrained(tmp_path / "causal", num_labels=0)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification, expected a causal language model"):
        roundpipe.from_pretrained(tmp_path / "scores")
    with pytest.raises(ValueError, match=r"score.weight \(2, 64\) instead of \(3, 64\)|have another shape there"):
        roundpipe.from_pretrained(tmp_path / "scores", num_labels=2)
