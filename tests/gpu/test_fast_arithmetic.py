"""Models in fast arithmetic have the bits of one worker with any number of them, whatever happens to a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import test_language_models
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.ops.packed_attention import register

SIZES: dict[str, Any] = {**test_language_models.SIZES, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(name: str, dtype: torch.dtype, **more: Any) -> Any:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **more)).to(dtype)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).to(dtype)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **more)).to(dtype)


def batch(packed: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 512, (6, 33), generator=torch.Generator().manual_seed(0))
    if not packed:
        return {"input_ids": ids, "labels": ids.clone()}
    positions = torch.stack([torch.arange(33) % length for length in (33, 12, 20, 7, 17, 30)])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def wrap(model: Any, **options: Any) -> Any:
    config = RoundPipeRunConfig(num_microbatch=3, **options.pop("config", {}))
    return wrap_model_to_roundpipe(model, model_run_config=config, arithmetic="fast", native=True, **options)


def trained(
    model: Any, scaled: bool = False, packed: bool = False, steps: int = 3, **options: Any
) -> list[torch.Tensor]:
    """Losses and weights; the losses are scaled by more than fp16 holds at first, if they are."""
    wrapped = wrap(copy.deepcopy(model), **options)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    scaler = roundpipe.GradScaler(init_scale=2.0**24) if scaled else None
    losses = []
    for _ in range(steps):
        if scaler is None:
            loss = wrapped.forward_backward(input_kwargs=batch(packed))
            wrapped.step(optimizer, max_grad_norm=1.0)
        else:
            loss = wrapped.forward_backward(
                input_kwargs=batch(packed),
                label=batch(packed)["labels"],
                loss_fn=lambda outputs, _: scaler.scale(outputs.loss),
            )
            wrapped.step(optimizer, max_grad_norm=1.0, scaler=scaler)
        losses.append(loss.detach())
    wrapped.synchronize()
    return [*losses, *(parameter.detach().clone() for parameter in wrapped.parameters())]


def check(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, expected, found))


@pytest.mark.kit
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("qwen3", torch.bfloat16, {}),
        ("qwen3", torch.float16, {"scaled": True}),
        ("qwen3", torch.float32, {"config": {"recompute_grain": "layer"}}),
        ("qwen3_moe", torch.bfloat16, {}),
        ("llama", torch.bfloat16, {"packed": True, "loss_chunk_tokens": 16}),
    ],
    ids=str,
)
def test_any_number_of_workers(name: str, dtype: torch.dtype, options: dict[str, Any], target: Any) -> None:
    register()
    model = build(name, dtype, attn_implementation="packed" if options.get("packed") else "sdpa")
    target.pool(1)
    expected = trained(model, **options)
    assert all(each.isfinite().all() for each in expected)
    for workers in (2, 3):
        target.pool(workers)
        check(expected, trained(model, **options))


def test_adapters(target: Any) -> None:
    model = build("qwen3", torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    target.pool(1)
    expected = trained(adapted)
    target.pool(2)
    check(expected, trained(adapted))


def test_a_step_that_ran_out_of_memory_is_not_added_twice(target: Any) -> None:
    """The cap has no room for whole stages: they run again layer by layer, or in smaller ones."""
    model = build("qwen3", torch.bfloat16)
    target.pool(1)
    expected = trained(model)
    pool = target.pool(2, 3 << 20) if not target.is_card else target.pool(2, 64 << 20)
    check(expected, trained(model))
    assert len(pool) == 2


def test_a_checkpoint_goes_on_with_the_same_bits(target: Any, tmp_path: Path) -> None:
    model = build("qwen3", torch.bfloat16)
    target.pool(2)

    def step(wrapped: Any, optimizer: Any) -> None:
        wrapped.forward_backward(input_kwargs=batch())
        wrapped.step(optimizer)

    first = wrap(copy.deepcopy(model))
    optimizer = roundpipe.optim.AdamW(first, lr=1e-2)
    step(first, optimizer)
    roundpipe.save_checkpoint(tmp_path, first, optimizer, wait=True)
    step(first, optimizer)
    first.synchronize()
    target.pool(1)
    again = wrap(copy.deepcopy(model))
    optimizer = roundpipe.optim.AdamW(again, lr=1e-2)
    roundpipe.load_checkpoint(tmp_path, again, optimizer)
    step(again, optimizer)
    again.synchronize()
    check(list(first.parameters()), list(again.parameters()))
