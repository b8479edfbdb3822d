"""Weights that are read straight from the files: transformers' bits, in little more memory than they take."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import roundpipe
from causal_models import ALL, build, padded_batch
from process_memory import report_of
from roundpipe.huggingface.weights.direct_loading import load_language_model
from roundpipe.huggingface.weights.files import Checkpoint
from roundpipe.huggingface.weights.safetensors_header import CheckpointError
from sweeps import sweep
from tiny_chat import tiny_llama


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    raw = tensor.detach().contiguous().view(-1)
    return tensor.dtype, tensor.shape, raw.view(torch.uint8).tolist() if raw.numel() else []


def check_same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(mine, kind)(remove_duplicate=False))
        expected = dict(getattr(theirs, kind)(remove_duplicate=False))
        assert found.keys() == expected.keys()
        assert all(bits(found[name]) == bits(expected[name]) for name in found)
        assert all(found[name].requires_grad == expected[name].requires_grad for name in found)
        same = [[a is b for b in found.values()] for a in found.values()]
        assert same == [[a is b for b in expected.values()] for a in expected.values()]
    assert mine.config.to_dict() == theirs.config.to_dict()
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert [module.training for module in mine.modules()] == [module.training for module in theirs.modules()]


def load(folder: Path, **options: Any) -> Any:
    return load_language_model(folder, "refuse", False, {"config": AutoConfig.from_pretrained(folder), **options})


def saved_files(model: Any, folder: Path) -> dict[str, tuple[Any, ...]]:
    model.save_pretrained(folder)
    return {name: bits(t) for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


DTYPES = ["auto", torch.float32, torch.bfloat16, torch.float16]


@sweep("name, is_sharded, dtype", ALL, [False, True], DTYPES, ids=str, together=1)
def test_bits_of_every_architecture(
    name: str, is_sharded: bool, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    model.generation_config.update(max_new_tokens=7)
    folder = tmp_path / "model"
    if is_sharded:
        model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB" if is_sharded else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == is_sharded
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with monkeypatch.context() as patch:
        patch.delattr("transformers.modeling_utils.safe_open")  # transformers would read with it
        mine = load(folder, dtype=dtype)
    check_same(mine, theirs)
    assert saved_files(mine, tmp_path / "mine") == saved_files(theirs, tmp_path / "theirs")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_experts_in_files_of_their_own(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "model")
    keys = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert any(".experts.3.down_proj.weight" in key for key in keys)
    model = roundpipe.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert any(".experts.gate_up_proj" in parameter for parameter, _ in theirs.named_parameters())
    mine = model.state_dict()
    assert all(bits(value) == bits(mine[key]) for key, value in theirs.state_dict().items())
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == keys


def test_experts_that_are_not_all_there_or_not_alike(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file({n: value for n, value in weights.items() if n != key}, tmp_path / "model.safetensors", {"format": "pt"})
    message = (
        r"have another shape there \(1\): model.layers.1.mlp.experts.down_proj \(3, 32, 16\) instead of \(4, 32, 16\)"
    )
    with pytest.raises(ValueError, match=message):
        roundpipe.from_pretrained(tmp_path)
    save_file(weights | {key: torch.ones(3, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"^\[checkpoint\] {key} in .* has the shape \(3, 3\), expected \(32, 16\) like"
    ):
        roundpipe.from_pretrained(tmp_path)


def test_the_model_that_is_wrapped_is_the_one_that_was_loaded(tmp_path: Path) -> None:
    build("gemma2").save_pretrained(tmp_path / "model")
    model = roundpipe.from_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, type(theirs)) and not model.training
    assert model.config._name_or_path == str(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = padded_batch()
    whole = roundpipe.RoundPipeRunConfig(num_microbatch=1)  # products of other sizes may have other bits
    with torch.no_grad():
        assert torch.equal(model(**batch, roundpipe_run_config=whole).loss, theirs(**batch).loss)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16])
def test_values_are_cast_as_transformers_casts_them(stored: torch.dtype, tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2).to(stored).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        check_same(load(tmp_path, dtype=dtype), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))


def test_names_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    check_same(load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


def test_tied_weights_that_differ_in_the_files(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    mine = load(tmp_path)
    assert mine.lm_head.weight is not mine.model.embed_tokens.weight
    check_same(mine, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_only_the_head_of_two_tied_weights(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    check_same(load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantised_weights_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    message = (
        r"^\[from_pretrained\] model.layers.1.mlp.up_proj.weight in .*model.safetensors has the dtype \w+, expected"
    )
    with pytest.raises(ValueError, match=message):
        roundpipe.from_pretrained(tmp_path)


def test_nothing_is_read_before_all_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("roundpipe.huggingface.weights.files.Checkpoint.read_into", read)
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    broken = {
        "missing": {name: value for name, value in weights.items() if "norm" not in name},
        "extra": weights | {"more": torch.ones(1)},
        "shape": weights | {"model.norm.weight": torch.ones(3)},
        "kind": weights | {"model.norm.weight": torch.ones(64, dtype=torch.int64)},
    }
    for changed in broken.values():
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"norm.weight|more"):
            load(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="read"):
        load(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    compare = roundpipe.huggingface.weights.direct_loading._Fill._compare

    def shrinking(*args: Any) -> Any:
        info = compare(*args)
        path.write_bytes(path.read_bytes()[:-1000])
        return info

    monkeypatch.setattr("roundpipe.huggingface.weights.direct_loading._Fill._compare", shrinking)
    with pytest.raises(ValueError, match=r"^\[checkpoint\] .*model.safetensors ended inside .*expected the file"):
        roundpipe.from_pretrained(tmp_path)


def test_an_interrupt_stops_the_threads_that_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    inside = threading.Event()
    read_into = Checkpoint.read_into

    def endless(self: Checkpoint, name: str, out: torch.Tensor) -> Iterator[int]:
        yield from read_into(self, name, out)
        inside.set()
        while name == "model.norm.weight":
            yield 0

    def interrupted(*_: object) -> None:
        assert inside.wait(300)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "read_into", endless)
    monkeypatch.setattr("roundpipe.huggingface.weights.direct_loading._put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roundpipe-read")]


def test_a_model_of_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0123456789012345678901234567890123456789"
    repo = tmp_path / "models--owner--tiny"
    tiny_llama(num_hidden_layers=2).save_pretrained(repo / "snapshots" / commit, max_shard_size="100KB")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    options: dict[str, Any] = {"cache_dir": tmp_path, "local_files_only": True}
    config = AutoConfig.from_pretrained("owner/tiny", **options)
    mine = load_language_model("owner/tiny", "refuse", False, {"config": config, **options})
    check_same(mine, AutoModelForCausalLM.from_pretrained("owner/tiny", **options))


def test_a_mapping_of_names_that_the_user_gives(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    weights = {f"old_{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    options = {"key_mapping": {"^old_": ""}}
    check_same(load(tmp_path, **options), AutoModelForCausalLM.from_pretrained(tmp_path, **options))


def test_other_formats_are_left_to_transformers(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check_same(load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(("layers", "gigabytes"), [(6, 0.8), (15, 2)])
def test_gigabytes_in_their_own_size_and_a_tenth(layers: int, gigabytes: float, tmp_path: Path) -> None:
    try:
        report = report_of("loading_memory_program.py", tmp_path, str(layers))
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert report["final_bytes"] >= gigabytes * 1e9
    assert report["different"] == []
    assert report["peak_bytes"] <= 1.1 * report["final_bytes"], report


@pytest.mark.long
def test_gigabytes_encoded_take_their_encoded_size_and_a_layer(tmp_path: Path) -> None:
    try:
        report = report_of("loading_memory_program.py", tmp_path, "15", "nf4")
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert report["final_bytes"] <= 0.15 * 2.1e9  # of fp32
    assert report["peak_bytes"] <= 1.1 * (report["final_bytes"] + report["layer_bytes"]), report
