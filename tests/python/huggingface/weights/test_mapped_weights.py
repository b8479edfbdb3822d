"""Frozen weights that stay in their mapped files: the same training, without host memory for them."""

from __future__ import annotations

import gc
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import roundpipe
from causal_models import build, padded_batch
from robustness import give_free_memory_back
from roundpipe import RoundPipeRunConfig, _core, optim
from sweeps import mostly_long
from tiny_chat import tiny_llama

BATCH = padded_batch()


pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose tensors begin where a float32 may."""
    folder = tmp_path_factory.mktemp("models") / "base"
    build("llama").save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "base"))


def load(folder: Path, kind: str, **options: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    config.init_lora_weights = options.pop("init_lora_weights", False)
    config.modules_to_save = options.pop("modules_to_save", None)
    return roundpipe.from_pretrained(folder, peft_config=config, frozen_weights=kind, name="model", **options)


def train(model: Any, steps: int = 3) -> list[float]:
    optimizer = optim.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(steps):
        config = RoundPipeRunConfig(num_microbatch=2)
        losses.append(float(model.forward_backward(input_kwargs=BATCH, run_config=config)))
        model.step(optimizer)
    model.synchronize()
    return losses


def check_same_state(mine: Any, theirs: Any) -> None:
    mine, theirs = mine.state_dict(), theirs.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, mine[name]) for name, value in theirs.items())


def mapped(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model._original_model.named_parameters() if _core.is_mapped(p)}


@pytest.mark.parametrize("name", mostly_long(["llama", "gemma2", "gpt2", "deepseek_v3"], "gpt2"))
def test_bits_of_weights_in_memory(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    mine, theirs = load(tmp_path / "base", "mmap"), load(tmp_path / "base", "memory")
    assert mapped(mine) and not mapped(theirs)
    assert train(mine) == train(theirs)
    check_same_state(mine, theirs)
    # Also through a second map, after steps.
    with torch.no_grad():
        assert torch.equal(mine(**BATCH).logits, theirs(**BATCH).logits)


def test_mapped_weights_are_no_host_memory(folder: Path) -> None:
    models = {kind: load(folder, kind) for kind in ("mmap", "memory")}
    frozen = [p for p in models["mmap"]._original_model.parameters() if not p.requires_grad]
    assert all(map(_core.is_mapped, frozen))
    sizes = {kind: model.host_bytes() for kind, model in models.items()}
    frozen_bytes = sum(p.nbytes for p in frozen)
    assert frozen_bytes <= sizes["memory"] - sizes["mmap"] <= frozen_bytes + 256 * len(frozen)


def anonymous_bytes() -> int:
    """Memory that is this process's own: no pages of files."""
    give_free_memory_back()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no such line")


@pytest.mark.long
def test_mapped_weights_take_no_memory_of_the_process(tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=3, hidden_size=512, intermediate_size=2048).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    taken = {"memory": [0], "mmap": [size * 2]}
    # The first leaves behind what later ones find; several, since the allocator gives memory back as it likes.
    for kind in ("memory", *3 * ("memory", "mmap")):
        gc.collect()
        before = anonymous_bytes()
        model = load(tmp_path, kind)
        model.forward_backward(input_kwargs=BATCH)
        model.synchronize()
        roundpipe.devices("virtual:2")  # gives the memory of devices back
        taken[kind].append(anonymous_bytes() - before)
        del model
        gc.collect()
    assert max(taken["memory"]) - min(taken["mmap"]) > 0.9 * size, taken


def test_what_does_not_lie_in_the_files_as_in_memory_is_read(folder: Path) -> None:
    model = load(folder, "mmap", dtype=torch.bfloat16)
    assert not mapped(model)
    assert train(model) == train(load(folder, "memory", dtype=torch.bfloat16))


def test_tensors_between_two_multiples_of_their_elements_are_read(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    model = load(tmp_path, "mmap")
    assert not mapped(model)
    assert train(model) == train(load(tmp_path, "memory"))


def test_experts_that_are_built_from_several_tensors_are_read(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    model = load(tmp_path, "mmap")
    in_memory = {
        name for name, p in model._original_model.named_parameters() if not p.requires_grad and not _core.is_mapped(p)
    }
    assert in_memory and all(".experts." in name for name in in_memory)
    assert train(model) == train(load(tmp_path, "memory"))


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}])
def test_adapters_that_change_the_base(options: dict[str, Any], folder: Path) -> None:
    mine, theirs = load(folder, "mmap", **options), load(folder, "memory", **options)
    assert train(mine) == train(theirs)
    check_same_state(mine, theirs)


def test_values_that_the_user_writes_are_used_and_stay_in_the_process(folder: Path) -> None:
    def change(model: Any) -> None:
        weight = model._original_model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight
        with torch.no_grad():
            weight.mul_(2)
        norm = model._original_model.get_base_model().model.norm.weight
        norm.data = torch.full_like(norm, 0.5)

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    mine, theirs = load(folder, "mmap"), load(folder, "memory")
    expected = train(load(folder, "memory"))
    change(mine)
    change(theirs)
    losses = train(mine)
    assert losses == train(theirs) != expected
    check_same_state(mine, theirs)
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_mapped_weight_that_is_to_be_trained_after_all(folder: Path) -> None:
    models = [load(folder, kind) for kind in ("mmap", "memory")]
    for model in models:
        model._original_model.get_base_model().model.layers[1].mlp.requires_grad_(True)
    losses = [train(model) for model in models]
    assert losses[0] == losses[1]
    check_same_state(*models)
    names = {name.split("base_model.model.")[1] for name in mapped(models[0])}
    assert "model.layers.0.mlp.up_proj.base_layer.weight" in names
    assert "model.layers.1.mlp.up_proj.base_layer.weight" not in names


def test_without_adapters_nothing_stays_mapped(folder: Path) -> None:
    model = roundpipe.from_pretrained(folder, frozen_weights="mmap", name="model")
    assert not mapped(model)
    assert train(model) == train(roundpipe.from_pretrained(folder, name="model"))


def test_a_model_that_is_wrapped_part_by_part(folder: Path) -> None:
    losses = []
    for kind in ("mmap", "memory"):
        model = load(folder, kind, use_sequential_preset=False)
        assert bool(mapped(model)) == (kind == "mmap")
        optimizer = optim.AdamW(model, lr=1e-2)
        for _ in range(2):
            arguments = {**BATCH, "use_cache": False}
            loss = model.forward_backward(input_kwargs=arguments, loss_fn=lambda outputs, _: outputs.loss)
            model.step(optimizer)
        model.synchronize()
        losses.append(float(loss))
    assert losses[0] == losses[1]


# --- the files afterwards ---


def test_files_that_are_replaced_or_removed_do_not_matter(folder: Path) -> None:
    model = load(folder, "mmap")
    expected = train(load(folder, "memory"))
    for path in folder.glob("*.safetensors"):
        zeros = {name: torch.zeros_like(value) for name, value in load_file(path).items()}
        save_file(zeros, folder / "other", {"format": "pt"})
        os.replace(folder / "other", path)
    shutil.rmtree(folder)
    assert train(model) == expected


@pytest.mark.parametrize("merged", mostly_long([False, True], True))
def test_saving_onto_the_files_that_are_mapped(merged: bool, folder: Path, tmp_path: Path) -> None:
    mine, theirs = load(folder, "mmap"), load(folder, "memory")
    for model, out in ((mine, folder), (theirs, tmp_path / "other")):
        train(model)
        model.save_pretrained(out)
        base = model.merge_and_unload() if merged else model._original_model.get_base_model()
        base.save_pretrained(out)
    mine_files, their_files = (
        {p.name: p.read_bytes() for p in f.glob("*.safetensors")} for f in (folder, tmp_path / "other")
    )
    assert {name: mine_files[name] for name in their_files} == their_files
    if not merged:
        check_same_state(mine, theirs)
        assert train(mine) == train(theirs)


def test_adapters_of_a_mapped_base_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    model = load(folder, "mmap")
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    config = RoundPipeRunConfig(num_microbatch=1)
    again = roundpipe.from_pretrained(tmp_path / "adapter", frozen_weights="mmap", model_run_config=config).eval()
    assert mapped(again)
    with torch.no_grad():
        assert torch.equal(again(**BATCH).logits, plain(**BATCH).logits)


def test_options_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] frozen_weights is 'disk', expected 'memory' or 'mmap'"):
        load(folder, "disk")
    monkeypatch.setattr(metadata, "version", lambda _: "0.7.0rc1")
    with pytest.raises(ValueError, match=r"^\[from_pretrained\] frozen_weights='mmap' with safetensors 0.7.0rc1, exp"):
        load(folder, "mmap")
