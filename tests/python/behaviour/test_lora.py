"""Adapters of peft in a model in the pipeline: the base is frozen, and only adapters have gradients and moments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import roundpipe
from causal_models import BATCHES, build, padded_batch
from gradients import check_gradients, gradients
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import mostly_long, sweep

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "with_head": {"modules_to_save": ["lm_head"]},
}
ARCHITECTURES = ["llama", "gpt2", "gemma2", "gemma3n", "phi", "qwen3_moe", "deepseek_v3"]


pytestmark = pytest.mark.usefixtures("one_device")


def adapters(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=3, task_type="CAUSAL_LM", **{"target_modules": "all-linear", **options})


def make(name: str, order: str, config: peft.LoraConfig, microbatches: int = 1, grain: Any = None) -> tuple[Any, Any]:
    """(the model in the pipeline, the same with peft alone)."""
    options = RoundPipeRunConfig(num_microbatch=microbatches, recompute_grain=grain)
    torch.manual_seed(1)
    plain = peft.get_peft_model(build(name), copy.deepcopy(config))
    if order == "peft first":
        model = wrap_model_to_roundpipe(peft.get_peft_model(build(name), config), model_run_config=options)
    else:
        model = peft.get_peft_model(wrap_model_to_roundpipe(build(name), model_run_config=options), config)
    generator = torch.Generator().manual_seed(2)
    for parameter in plain.parameters():
        if parameter.requires_grad:  # B begins at zero
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.load_state_dict(plain.state_dict())
    return model, plain


def check_bits(model: Any, plain: Any, batch: dict[str, Any]) -> None:
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    loss = model.forward_backward(input_kwargs=batch)
    model.synchronize()
    assert torch.equal(loss, expected.detach())
    mine = gradients(model)
    assert mine.keys() == gradients(plain).keys()
    check_gradients(mine, gradients(plain), exact=True)


@sweep("kind, order", KINDS, ["peft first", "wrapped first"], ids=str, together=1)
def test_bits_of_peft_alone(kind: str, order: str) -> None:
    model, plain = make("llama", order, adapters(**KINDS[kind]))
    check_bits(model, plain, padded_batch())


@sweep("name, grain, batch", ARCHITECTURES, ["stage", "layer"], BATCHES, together=1)
def test_architectures(name: str, grain: Any, batch: str) -> None:
    roundpipe.devices("virtual:4,debug")
    inputs = BATCHES[batch]()
    model, plain = make(name, "peft first", adapters(), microbatches=4, grain=grain)
    expected = plain(**inputs, use_cache=False).loss
    expected.backward()
    loss = model.forward_backward(input_kwargs=inputs)
    model.synchronize()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    check_gradients(gradients(model), gradients(plain), exact=False)


@pytest.mark.parametrize("order", mostly_long(["peft first", "wrapped first"], "wrapped first"))
def test_steps_change_adapters_alone(order: str) -> None:
    model, plain = make("llama", order, adapters())
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    mine = roundpipe.optim.AdamW(model, lr=1e-2)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    for _ in range(3):
        expected = plain(**padded_batch(), use_cache=False).loss
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        loss = model.forward_backward(input_kwargs=padded_batch())
        model.step(mine, is_async=False)
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    model.synchronize()
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)


@pytest.mark.parametrize("order", mostly_long(["peft first", "wrapped first"], "peft first"))
def test_only_adapters_take_gradient_and_optimizer_memory(order: str) -> None:
    model, _ = make("llama", order, adapters())
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    for _ in range(3):
        model.forward_backward(input_kwargs=padded_batch())
        model.step(optimizer)
    model.synchronize()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = optimizer.host_memory()
    assert memory.parameters == trained
    assert memory.moments == 8 * trained
    # Two buffers of the adapters' size beside the weights, and what alignment costs each block.
    blocks = [block for pipeline in optimizer._group.models.all_pipelines() for block in pipeline.block_parameters()]
    assert all(len({p.requires_grad for p in block}) == 1 for block in blocks)
    assert memory.weights_and_gradients - weights < 2 * 4 * trained + 256 * 16 * len(blocks)


@sweep(
    "kind, order",
    KINDS,
    ["peft first", "wrapped first"],
    ids=str,
    together=1,
    short=["bias", "dora", "with_head"],
)
def test_files_are_those_of_peft(kind: str, order: str, tmp_path: Path) -> None:
    model, plain = make("llama", order, adapters(**KINDS[kind]))
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    model.forward_backward(input_kwargs=padded_batch())
    model.step(optimizer)
    model.save_pretrained(tmp_path / "mine")
    plain.save_pretrained(tmp_path / "theirs")
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == sorted(
        p.name for p in (tmp_path / "theirs").iterdir()
    )
    mine = load_file(tmp_path / "mine" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in mine.items()} == {
        name: (t.shape, t.dtype) for name, t in theirs.items()
    }
    assert not all(torch.equal(mine[name], theirs[name]) for name in mine)
    alone = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "mine").eval()
    model.synchronize()
    ids = padded_batch()["input_ids"]
    model.eval()
    assert torch.equal(alone(ids, use_cache=False).logits, model(input_ids=ids).logits)


def test_what_is_frozen_after_wrapping_takes_no_gradient_memory() -> None:
    model = wrap_model_to_roundpipe(build("llama"))
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    model.forward_backward(input_kwargs=padded_batch())
    model.step(optimizer)
    model.synchronize()
    blocks = optimizer._group.models.all_pipelines()[0].block_parameters()
    assert {len({p.requires_grad for p in block}) for block in blocks} == {1}


def test_adapters_after_an_optimizer_was_made_are_refused() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"))
    roundpipe.optim.AdamW(wrapped, lr=1e-3)
    model = peft.get_peft_model(wrapped, adapters())
    with pytest.raises(ValueError, match=r"added, removed or replaced after the model was wrapped|was frozen when"):
        model.forward_backward(input_kwargs=padded_batch())


def test_adapters_of_the_embedding_and_the_head() -> None:
    model, plain = make("llama", "peft first", adapters(target_modules=["embed_tokens", "q_proj", "lm_head"]))
    check_bits(model, plain, padded_batch())


def with_two() -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(build("llama"), adapters(target_modules=["q_proj", "v_proj"]))
    model.add_adapter("second", adapters(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # B begins at zero
            parameter.data.normal_(std=0.1)
    return model


def losses_over_switches(model: Any, backward: Callable[[], float]) -> list[float]:
    """Two steps of one optimizer over all adapters, with gradients of both kinds of switches in between."""
    found = []
    adapted = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapted, lr=1e-2)
    for _ in range(2):
        found.append(backward())
        with model.disable_adapter(), torch.no_grad():
            found.append(float(model(**padded_batch(), use_cache=False).loss))
        found.append(backward())
        model.set_adapter("second")
        found.append(backward())
        if isinstance(model, roundpipe.RoundPipe):
            model.synchronize()
        found.append(float(torch.nn.utils.clip_grad_norm_(adapted, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        model.set_adapter("default")
    return found


@pytest.mark.parametrize("way", mostly_long(["backward", "forward_backward"], "forward_backward"))
def test_switching_adapters_between_backwards_of_a_step(way: str) -> None:
    plain, model = (
        with_two(),
        wrap_model_to_roundpipe(with_two(), model_run_config=RoundPipeRunConfig(num_microbatch=1)),
    )

    def backward(each: Any) -> float:
        loss = each(**padded_batch(), use_cache=False).loss
        loss.backward()
        return loss.item()

    def forward_backward() -> float:
        return float(model.forward_backward(input_kwargs=padded_batch()))

    expected = losses_over_switches(plain, lambda: backward(plain))
    found = losses_over_switches(model, (lambda: backward(model)) if way == "backward" else forward_backward)
    assert found == expected
    assert model.calls == 8  # each draws other numbers, though the model was followed again
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_an_adapter_that_no_optimizer_has_is_refused_by_name() -> None:
    model = wrap_model_to_roundpipe(with_two())
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    model.forward_backward(input_kwargs=padded_batch())
    model.step(optimizer)
    model.set_adapter("second")
    with pytest.raises(ValueError, match=r"lora_A\.second.*no optimizer would update it.*set_adapter"):
        model.forward_backward(input_kwargs=padded_batch())
