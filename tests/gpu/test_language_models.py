"""Followed language models against the plain model on the same device, fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ),
}
# The same kernels run, but on batches of other sizes.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 512, (6, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, :30] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed_batch() -> dict[str, torch.Tensor]:
    """Several documents in each row."""
    ids = torch.randint(3, 512, (6, 33), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.arange(33) % length for length in (33, 12, 20, 7, 17, 30)])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@pytest.mark.parametrize(
    ("make_batch", "lora", "chunks"),
    [(batch, False, None), (batch, False, 16), (batch, True, 16), (packed_batch, False, 16)],
)
@pytest.mark.parametrize("name", MODELS)
def test_plain_model(
    name: str,
    make_batch: Callable[[], dict[str, torch.Tensor]],
    lora: bool,
    chunks: int | None,
    pool: roundpipe.DevicePool,
    accelerator: str,
) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    if lora:
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    plain = copy.deepcopy(model).to(accelerator)
    expected = plain(**{key: value.to(accelerator) for key, value in make_batch().items()}, use_cache=False).loss
    expected.backward()
    wrapped = wrap_model_to_roundpipe(
        model,
        loss_chunk_tokens=chunks,
        mlp_chunk_tokens=chunks,
        model_run_config=RoundPipeRunConfig(num_microbatch=3, recompute_grain="layer"),
    )
    loss = wrapped.forward_backward(input_kwargs=make_batch())
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected.detach().cpu(), **TOLERANCE)
    for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad.cpu(), **TOLERANCE, msg=key)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_steps_learn(kind: str, pool: roundpipe.DevicePool) -> None:
    torch.manual_seed(0)
    model = wrap_model_to_roundpipe(MODELS["llama"]().to(getattr(torch, kind)))
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(float(model.forward_backward(input_kwargs=batch())))
        model.step(optimizer, max_grad_norm=1.0)
    model.synchronize()
    assert losses[-1] < 0.85 * losses[0]
