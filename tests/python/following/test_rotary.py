"""Rotary positions that depend on the longest row: rows beyond `max_position_embeddings`, as in the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import roundpipe
from gradients import check_gradients, gradients
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import sweep

LIMIT = 16
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LIMIT}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
LONG = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 100.0, "original_max_position_embeddings": LIMIT}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}


def llama(rope: dict[str, Any]) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=rope))


def gemma3(rope: dict[str, Any]) -> Any:
    """Each type of layers has frequencies of its own."""
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": rope}
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "head_dim": 8, "sliding_window": 4},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=kinds,
    )
    return transformers.Gemma3ForCausalLM(config)


MAKERS = {"llama dynamic": (llama, DYNAMIC), "llama long": (llama, LONG), "gemma3 dynamic": (gemma3, DYNAMIC)}


def batch(length: int, positions: bool) -> dict[str, Any]:
    ids = torch.randint(3, 97, (5, length), generator=torch.Generator().manual_seed(length))
    made = {"input_ids": ids, "labels": ids}
    if positions:  # only the first rows have late positions
        made["position_ids"] = torch.arange(length).expand(5, -1).clone()
        made["position_ids"][2:] %= LIMIT // 2
    return made


@sweep("name, microbatches, devices", MAKERS, [1, 3], [1, 2], ids=str, together=1)
def test_rows_of_all_lengths(name: str, microbatches: int, devices: int, one_torch_thread: None) -> None:
    """In this order, since a long batch changes what shorter ones get, until one is short enough."""
    roundpipe.devices(f"virtual:{devices},debug")
    make, rope = MAKERS[name]
    torch.manual_seed(0)
    plain = make(rope).train()
    model = copy.deepcopy(plain)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    for length, positions in ((40, False), (20, False), (24, True), (LIMIT, False), (8, False), (20, False)):
        given = batch(length, positions)
        plain.zero_grad()
        wrapped.zero_grad()
        expected = plain(**given, use_cache=False).loss
        expected.backward()
        loss = wrapped.forward_backward(input_kwargs=given)
        wrapped.synchronize()
        exact = microbatches == 1
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0 if exact else 1e-5)
        check_gradients(gradients(model), gradients(plain), exact=exact)


def test_a_batch_is_run_again_with_its_own_frequencies() -> None:
    """Backward passes recompute a batch after later batches of other lengths have run."""
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)
    plain = llama(DYNAMIC).train()
    model = copy.deepcopy(plain)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    batches = [batch(length, False) for length in (40, 8, 24)]
    pending = [wrapped.submit(input_kwargs=each) for each in batches]
    losses = [each.loss() for each in pending]
    wrapped.synchronize()
    for given, loss in zip(batches, losses, strict=True):
        expected = plain(**given, use_cache=False).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    check_gradients(gradients(model), gradients(plain), exact=False)


def test_other_positions_end_where_the_model_says() -> None:
    wrapped = wrap_model_to_roundpipe(llama({"rope_type": "default", "rope_theta": 100.0}))
    with pytest.raises(ValueError, match=r"the batch has 20 positions, the model has max_position_embeddings = 16"):
        wrapped(input_ids=torch.ones(2, 20, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the batch has 20 positions"):
        wrapped(inputs_embeds=torch.randn(2, 20, 32))


def test_the_users_model_keeps_its_frequencies() -> None:
    model = llama(DYNAMIC)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    wrapped = wrap_model_to_roundpipe(model)
    wrapped.forward_backward(input_kwargs=batch(40, False))
    wrapped.synchronize()
    assert torch.equal(rotary.inv_freq, before) and rotary.max_seq_len_cached == LIMIT and rotary.rope_type == "dynamic"
