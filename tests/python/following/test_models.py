"""Encoder-decoders, encoders, classifiers, vision and base models: the plain model's loss and gradients."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, BertForPreTraining

import roundpipe
from gradients import check_gradients, gradients
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import mostly_long, sweep
from transformers_models import CONTRASTIVE, WITH_LOSS, WITHOUT_LOSS, build, text

ONE = RoundPipeRunConfig(num_microbatch=1)
ENCODER_DECODERS = {"t5", "bart", "whisper"}


pytestmark = pytest.mark.usefixtures("one_device")


def wrap(model: torch.nn.Module, config: RoundPipeRunConfig = ONE, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return wrap_model_to_roundpipe(model, model_run_config=config, **options)


def run_plain(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


@sweep("name, grain", WITH_LOSS, ["stage", "layer"], ids=str, together=1)
def test_bits_of_the_plain_model(name: str, grain: Any) -> None:
    make, batch = WITH_LOSS[name]
    model = build(make)
    expected, theirs = run_plain(copy.deepcopy(model), batch(4))
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=1, recompute_grain=grain))
    assert wrapped.num_layers == 2 + (6 if name in ENCODER_DECODERS else 3)
    loss = wrapped.forward_backward(input_kwargs=batch(4))
    wrapped.synchronize()
    assert torch.equal(loss, expected)
    check_gradients(gradients(model), theirs, exact=True)


@sweep("name, devices", WITH_LOSS, [1, 2, 4], ids=str, together=1, short=list(WITH_LOSS)[::3])
def test_unequal_microbatches(name: str, devices: int) -> None:
    """Seven rows in three: three rows, two and two, with other numbers of labels that count."""
    make, batch = WITH_LOSS[name]
    model = build(make)
    expected, theirs = run_plain(copy.deepcopy(model), batch(7))
    roundpipe.devices(f"virtual:{devices},debug")
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=3))
    loss = wrapped.forward_backward(input_kwargs=batch(7))
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    check_gradients(gradients(model), theirs, exact=False)


@pytest.mark.parametrize("name", ["t5", "bert_masked", "bert_classifier", "vit", "llama_reward"])
def test_the_loss_in_a_loss_function_is_its_part(name: str) -> None:
    make, batch = WITH_LOSS[name]
    model = build(make)
    expected, theirs = run_plain(copy.deepcopy(model), batch(7))
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=3))
    loss, outputs = wrapped.forward_backward(
        input_kwargs=batch(7), loss_fn=lambda outputs, _: outputs.loss, return_outputs=True
    )
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.loss, expected, rtol=0, atol=1e-5)
    check_gradients(gradients(model), theirs, exact=False)


@sweep("name, microbatches", WITH_LOSS, [1, 3], ids=str, together=1, short=list(WITH_LOSS)[1::3])
def test_outputs(name: str, microbatches: int) -> None:
    make, batch = WITH_LOSS[name]
    model = build(make)
    arguments = {**batch(4), "output_hidden_states": True} if name in ENCODER_DECODERS else batch(4)
    reference = copy.deepcopy(model)
    has_cache = "use_cache" in inspect.signature(reference.forward).parameters
    theirs = reference(**arguments, **({"use_cache": False} if has_cache else {}))
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=microbatches))
    mine = wrapped(**arguments)
    assert type(mine) is type(theirs) and list(mine) == list(theirs)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (mine, theirs)), strict=True):
        if microbatches == 1:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    theirs.loss.backward()
    mine.loss.backward()
    wrapped.synchronize()
    check_gradients(gradients(model), gradients(reference), exact=microbatches == 1)


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_base_models(name: str) -> None:
    make, batch = WITHOUT_LOSS[name]
    model = build(make)
    reference = copy.deepcopy(model)
    expected = reference(**batch(4)).last_hidden_state.square().mean()
    expected.backward()
    wrapped = wrap(model)
    assert isinstance(wrapped, RoundPipe) and wrapped.num_layers >= 5
    loss = wrapped.forward_backward(
        input_kwargs=batch(4), loss_fn=lambda outputs, _: outputs.last_hidden_state.square().mean()
    )
    wrapped.synchronize()
    assert torch.equal(loss, expected.detach())
    check_gradients(gradients(model), gradients(reference), exact=True)


def test_a_contrastive_loss_is_of_the_whole_batch() -> None:
    make, batch = CONTRASTIVE
    model = build(make)
    expected, theirs = run_plain(copy.deepcopy(model), batch(4))
    roundpipe.devices("virtual:2,debug")
    with pytest.warns(UserWarning, match=r"CLIPModel mixes the rows of a batch .*calls run as one microbatch"):
        wrapped = wrap_model_to_roundpipe(model)
    assert wrapped.num_layers == 3 + 3 + 2
    loss = wrapped.forward_backward(input_kwargs=batch(4))
    wrapped.synchronize()
    assert torch.equal(loss, expected)
    check_gradients(gradients(model), theirs, exact=True)
    with pytest.raises(ValueError, match=r"CLIPModel cannot be cut into 2 microbatches.*set num_microbatch=1"):
        wrapped.forward_backward(input_kwargs=batch(4), run_config=RoundPipeRunConfig(num_microbatch=2))
    with pytest.raises(ValueError, match=r"mixes the rows of a batch .*so 2 microbatches would compute something else"):
        wrap(build(make), RoundPipeRunConfig(num_microbatch=2))


def test_two_losses_in_one_are_of_the_whole_batch() -> None:
    """The mean over tokens and the mean over rows add up: no one number weighs a microbatch."""
    config = build(WITH_LOSS["bert_masked"][0]).config
    model = build(lambda: BertForPreTraining(config))
    batch = {**WITH_LOSS["bert_masked"][1](5), "next_sentence_label": torch.tensor([0, 1, 1, 0, 1])}
    expected, theirs = run_plain(copy.deepcopy(model), batch)
    roundpipe.devices("virtual:2,debug")
    wrapped = wrap(model, RoundPipeRunConfig())
    with pytest.raises(ValueError, match="what its loss is the mean of is not known"):
        wrapped.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=3))
    assert torch.equal(wrapped.forward_backward(input_kwargs=batch), expected)
    wrapped.synchronize()
    check_gradients(gradients(model), theirs, exact=True)


def test_positions_outside_of_a_row_do_not_count() -> None:
    make, batch = WITH_LOSS["bert_answers"]
    model = build(make)
    outside = batch(4)
    outside["start_positions"][1] = 50
    expected, _ = run_plain(copy.deepcopy(model), outside)
    wrapped = wrap(model, RoundPipeRunConfig())
    assert torch.equal(wrapped.forward_backward(input_kwargs=outside), expected)
    with pytest.raises(ValueError, match="positions outside of a row"):
        wrapped.forward_backward(input_kwargs=outside, run_config=RoundPipeRunConfig(num_microbatch=2))


def test_wrapping_leaves_the_kind_of_problem_open() -> None:
    model = build(WITH_LOSS["bert_multi_label"][0])
    wrap(model)
    assert model.config.problem_type is None


@pytest.mark.parametrize("name", ["bert_classifier", "bert_multi_label"])
def test_labels_of_any_kind_reach_the_loss(name: str) -> None:
    """Those of numbers are left behind only where no loss needs them, which wrapping tries with classes."""
    make, batch = WITH_LOSS[name]
    model = build(make)
    expected = copy.deepcopy(model)(**batch(4)).loss
    assert torch.equal(wrap(model, RoundPipeRunConfig(num_microbatch=1))(**batch(4)).loss, expected)


def test_the_documented_steps_train() -> None:
    model = build(WITH_LOSS["bert_classifier"][0])
    wrapped = wrap(model, RoundPipeRunConfig())
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    batch = WITH_LOSS["bert_classifier"][1](6)
    losses = []
    for _ in range(6):
        losses.append(float(wrapped.forward_backward(input_kwargs=batch)))
        wrapped.step(optimizer, is_async=False)
    assert losses[-1] < losses[0] / 2


def test_layers_left_out_at_random_are_not_followed() -> None:
    options = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 40, "encoder_layerdrop": 0.5}
    options |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    with pytest.warns(UserWarning, match=r"leaves out layers at random \(layerdrop = 0.5.*part by part"):
        wrap_model_to_roundpipe(BartForConditionalGeneration(BartConfig(**options)))


def test_a_frozen_encoder() -> None:
    make, batch = WITH_LOSS["t5"]
    model = build(make)
    model.encoder.block.requires_grad_(False)
    expected, theirs = run_plain(copy.deepcopy(model), batch(4))
    wrapped = wrap(model)
    loss = wrapped.forward_backward(input_kwargs=batch(4))
    wrapped.synchronize()
    assert torch.equal(loss, expected)
    check_gradients(gradients(model), theirs, exact=True)


def test_other_lengths_than_when_it_was_wrapped() -> None:
    make, _ = WITH_LOSS["t5"]
    model = build(make).eval()
    wrapped = wrap(model)
    for source, target in ((5, 21), (30, 3), (1, 1)):
        batch = {**text(2, source + 4), "decoder_input_ids": text(2, target + 4)["input_ids"]}
        expected = model(**batch, use_cache=False).logits
        assert torch.equal(wrapped(**batch).logits, expected)


@pytest.mark.parametrize("name", mostly_long(["t5", "bart", "whisper", "bert_masked"], "t5", "bert_masked"))
def test_losses_in_bfloat16_are_cut(name: str) -> None:
    """What a loss is the mean of is found out although the loss itself is rounded to 8 bits."""
    make, batch = WITH_LOSS[name]
    model = build(make).to(torch.bfloat16)
    arguments = {key: v.bfloat16() if v.is_floating_point() else v for key, v in batch(7).items()}
    expected, theirs = run_plain(copy.deepcopy(model), arguments)
    wrapped = wrap(model, RoundPipeRunConfig(num_microbatch=3))
    loss = wrapped.forward_backward(input_kwargs=arguments)
    wrapped.synchronize()
    torch.testing.assert_close(loss.float(), expected.float(), rtol=2**-6, atol=0)  # two units of bfloat16
    for key, mine in gradients(model).items():
        scale = float(theirs[key].float().abs().max())
        torch.testing.assert_close(mine.float(), theirs[key].float(), rtol=0, atol=0.05 * scale + 1e-4)
