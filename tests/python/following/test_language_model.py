"""Causal language models through the pipeline: outputs, loss and gradients of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import roundpipe
from causal_models import ALL, BATCHES, WITH_PRESET, build, padded_batch, tokens
from gradients import check_gradients, gradients
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.following.parts import After, Before, OwnLayer
from sweeps import mostly_long, sweep

ONE = RoundPipeRunConfig(num_microbatch=1)


pytestmark = pytest.mark.usefixtures("one_device")


def wrap(model: torch.nn.Module, config: RoundPipeRunConfig = ONE, **options: Any) -> Any:
    return wrap_model_to_roundpipe(model, model_run_config=config, **options)


def run_plain(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    outputs = model(**batch, use_cache=False)
    outputs.loss.backward()
    return outputs, gradients(model)


@sweep("name, grain, batch", ALL, ["stage", "layer"], BATCHES, together=1)
def test_bits_of_the_plain_model(name: str, grain: Any, batch: str) -> None:
    model = build(name)
    inputs = BATCHES[batch]()
    plain, theirs = run_plain(copy.deepcopy(model), inputs)
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=1, recompute_grain=grain))
    loss = wrapped.forward_backward(input_kwargs=inputs)
    wrapped.synchronize()
    assert torch.equal(loss, plain.loss.detach())
    check_gradients(gradients(model), theirs, exact=True)


@pytest.mark.parametrize("name", mostly_long(ALL, *list(ALL)[::4]))
def test_many_devices_and_microbatches(name: str) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    if name == "gpt_oss":  # routers' losses are those of their microbatches
        model.config.output_router_logits = reference.config.output_router_logits = False
    batch = padded_batch(rows=6)
    plain, theirs = run_plain(reference, batch)
    roundpipe.devices("virtual:4,debug")
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=4))
    loss = wrapped.forward_backward(input_kwargs=batch)
    wrapped.synchronize()
    torch.testing.assert_close(loss, plain.loss.detach(), rtol=0, atol=1e-5)
    check_gradients(gradients(model), theirs, exact=False)


@pytest.mark.parametrize("name", mostly_long(ALL, *list(ALL)[2::4]))
def test_outputs_and_their_graph(name: str) -> None:
    model = build(name)
    batch = padded_batch()
    plain, theirs = run_plain(copy.deepcopy(model), batch)
    wrapped = wrap(model)
    outputs = wrapped(**batch)
    assert type(outputs) is type(plain)
    assert torch.equal(outputs.logits, plain.logits) and torch.equal(outputs.loss, plain.loss)
    outputs.loss.backward()
    wrapped.synchronize()
    check_gradients(gradients(model), theirs, exact=True)


@pytest.mark.parametrize("name", ALL)
def test_the_layers_are_layers_of_the_pipeline(name: str) -> None:
    model = build(name)
    wrapped = wrap(model)
    chain = list(wrapped._language_model.chain)
    assert wrapped.num_layers == 3 + 2
    assert isinstance(chain[0], Before) and isinstance(chain[-1], After)
    assert all(isinstance(part, OwnLayer) for part in chain[1:-1])
    owned = [{id(p) for p in part.layer.parameters()} for part in chain[1:-1]]
    assert sum(map(len, owned)) == len(set.union(*owned)) and all(owned)
    around = {id(p) for part in (chain[0], chain[-1]) for p in part.parameters()}
    assert not around & set.union(*owned)
    assert around | set.union(*owned) | {id(p) for part in chain for p in part.parameters()} == {
        id(p) for p in model.parameters()
    }
    wrapped.forward_backward(input_kwargs=padded_batch())
    stages = [job.layers for job in wrapped.last_plan().jobs]
    assert {layer for stage in stages for layer in range(stage.first, stage.last)} == set(range(5))


def test_presets() -> None:
    for name in ALL:
        if name in WITH_PRESET:
            assert isinstance(wrap(build(name), use_sequential_preset=True), RoundPipe)
        else:
            with pytest.raises(NotImplementedError, match="no preset for"):
                wrap(build(name), use_sequential_preset=True)


def test_steps_follow_the_plain_loop() -> None:
    model = build("gemma2")
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    wrapped = wrap(model)
    mine = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    for seed in range(4):
        batch = {"input_ids": tokens(seed=seed), "labels": tokens(seed=seed)}
        expected = reference(**batch).loss
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        loss = wrapped.forward_backward(input_kwargs=batch)
        wrapped.step(mine, is_async=False)
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)


@sweep(
    "name, flags",
    ["llama", "gemma2", "qwen3_moe"],
    [
        {"output_hidden_states": True},
        {"output_hidden_states": [1, -1]},
        {"output_attentions": True},
        {"logits_to_keep": 2},
        {"return_dict": False},
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    together=1,
)
def test_what_a_forward_can_be_asked_for(name: str, flags: dict[str, Any]) -> None:
    model = build(name)
    model.set_attn_implementation("eager")
    batch = {"input_ids": tokens(), "use_cache": False, **flags}
    theirs = torch.utils._pytree.tree_leaves(copy.deepcopy(model)(**batch))
    mine = torch.utils._pytree.tree_leaves(wrap(model)(**batch))
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True) if isinstance(b, torch.Tensor))


@sweep("name, at_call", ["qwen3_moe", "qwen2_moe", "gpt_oss"], [True, False], together=1)
def test_router_losses(name: str, at_call: bool) -> None:
    model = build(name)
    model.config.output_router_logits = not at_call
    batch = padded_batch() | ({"output_router_logits": True} if at_call else {})
    plain, theirs = run_plain(copy.deepcopy(model), batch)
    assert plain.aux_loss is not None
    wrapped = wrap(model)
    loss = wrapped.forward_backward(input_kwargs=batch)
    wrapped.synchronize()
    assert torch.equal(loss, plain.loss.detach())
    check_gradients(gradients(model), theirs, exact=True)


def test_embeddings_instead_of_tokens() -> None:
    model = build("mistral")
    states = torch.randn(2, 7, 32, requires_grad=True)
    theirs = copy.deepcopy(model)(inputs_embeds=states).logits
    (expected,) = torch.autograd.grad(theirs.square().sum(), states)
    mine = wrap(model)(inputs_embeds=states).logits
    mine.square().sum().backward()
    assert torch.equal(mine, theirs) and torch.equal(states.grad, expected)


def test_sixteen_bits_and_autocast() -> None:
    model = build("llama")
    batch = padded_batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain, theirs = run_plain(copy.deepcopy(model), batch)
        wrapped = wrap(model)
        loss = wrapped.forward_backward(input_kwargs=batch)
    wrapped.synchronize()
    assert torch.equal(loss, plain.loss.detach())
    check_gradients(gradients(model), theirs, exact=True)

    model = build("llama").bfloat16()
    plain, theirs = run_plain(copy.deepcopy(model), batch)
    wrapped = wrap(model)
    assert torch.equal(wrapped.forward_backward(input_kwargs=batch), plain.loss.detach())
    wrapped.synchronize()
    check_gradients(gradients(model), theirs, exact=True)


def test_training_mode_is_the_models() -> None:
    model = build("opt")
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.5
    wrapped = wrap(model)
    batch = {"input_ids": tokens()}
    assert not torch.equal(wrapped(**batch).logits, wrapped(**batch).logits)
    wrapped.eval()
    expected = model(**batch, use_cache=False).logits
    assert torch.equal(wrapped(**batch).logits, expected) and torch.equal(wrapped(**batch).logits, expected)


def test_wrapping_leaves_the_model_as_it_was() -> None:
    model = build("gemma3").train()
    model(tokens(), output_hidden_states=True)  # lets transformers put its hooks in
    before = {name: (module.training, len(module._forward_hooks)) for name, module in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    wrapped = wrap(model)
    assert {name: (m.training, len(m._forward_hooks)) for name, m in model.named_modules()} == before
    assert all(torch.equal(value, values[name]) for name, value in wrapped.state_dict().items())
    assert isinstance(wrapped, RoundPipe) and isinstance(wrapped, type(model)) and wrapped.config is model.config


def test_generation_uses_the_trained_weights() -> None:
    model = build("llama").eval()
    wrapped = wrap(model)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    wrapped.forward_backward(input_kwargs=padded_batch())
    wrapped.step(optimizer, is_async=False)
    mine = wrapped.generate(tokens(1, 4), max_new_tokens=5, do_sample=False)
    wrapped.synchronize()
    again = build("llama").eval()
    again.load_state_dict(wrapped.state_dict())
    assert torch.equal(mine, again.generate(tokens(1, 4), max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_checkpointing_of_the_models_own(grain: Any) -> None:
    model = build("llama")
    model.gradient_checkpointing_enable()
    batch = padded_batch()
    plain, theirs = run_plain(copy.deepcopy(model), batch)
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=1, recompute_grain=grain))
    loss = wrapped.forward_backward(input_kwargs=transformers.BatchEncoding(batch))
    wrapped.synchronize()
    assert torch.equal(loss, plain.loss.detach())
    check_gradients(gradients(model), theirs, exact=True)


def test_a_vocabulary_that_grows_after_wrapping() -> None:
    wrapped = wrap(build("llama"))
    before = wrapped(input_ids=tokens()).logits
    wrapped.resize_token_embeddings(before.shape[-1] + 5, mean_resizing=False)
    after = wrapped(input_ids=tokens()).logits
    assert after.shape[-1] == before.shape[-1] + 5
    torch.testing.assert_close(after[..., : before.shape[-1]], before)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    wrapped.forward_backward(input_kwargs=padded_batch())
    wrapped.step(optimizer)
    wrapped.synchronize()
