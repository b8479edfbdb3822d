"""Whole models from elsewhere, wrapped and trained: the steps of the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe


@pytest.fixture(autouse=True)
def pool(one_torch_thread: None) -> None:
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)


def train_beside_plain(
    model: nn.Module,
    wrapped: Any,
    batches: list[dict[str, Any]],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    fused: bool = False,
) -> None:
    """Three synchronous steps of both; `model` is a copy of what was wrapped."""
    # With the usual eps, Adam moves what has no gradient but rounding, such as a key's bias, as far as all else.
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    optimizer = torch.optim.AdamW(wrapped.optim_parameters(), lr=1e-3, eps=1e-4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        expected = loss_of(model(**batch))
        expected.backward()
        reference.step()
        reference.zero_grad()
        if fused:
            loss = wrapped.forward_backward(input_kwargs=batch, loss_fn=lambda outputs, _: loss_of(outputs))
        else:
            loss = loss_of(wrapped(**batch))
            loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        wrapped.step(update, is_async=False)
    wrapped.synchronize()
    mine = {name.replace("_original_model.", ""): tensor for name, tensor in wrapped.optim_named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine[name], parameter, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def token_batches(vocabulary: int, **more: Any) -> list[dict[str, Any]]:
    return [{"input_ids": torch.randint(vocabulary, (4, 9)), **more} for _ in range(3)]


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation="eager",
        **options,
    )
    return LlamaForCausalLM(config)


def test_llama_part_by_part() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=512)
    assert isinstance(wrapped, AutoRoundPipe)
    assert all(isinstance(layer, RoundPipe) for layer in wrapped.model.layers)
    train_beside_plain(plain, wrapped, token_batches(50), lambda out: out.logits.square().mean(), fused=True)


def test_llama_as_one_layer() -> None:
    model = llama(tie_word_embeddings=True)
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    train_beside_plain(plain, wrapped, token_batches(50), lambda out: out.logits.square().mean(), fused=True)


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 50}])
def test_the_loss_of_a_llama_as_one_layer_is_that_of_the_batch(items: dict[str, int]) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    batch = {"input_ids": torch.arange(1, 41).view(4, 10), "labels": torch.arange(1, 41).view(4, 10)}
    batch["labels"][0, 2:] = -100
    expected = plain(**batch, **items).loss
    expected.backward()
    wrapped = wrap_model_to_roundpipe(model, use_sequential_preset=False, upper_threshold=1 << 30)
    loss = wrapped(**batch, **items).loss
    loss.backward()
    wrapped.synchronize()
    assert torch.equal(loss, expected)
    assert torch.equal(wrapped.lm_head.weight.grad, plain.lm_head.weight.grad)
    two = RoundPipeRunConfig(num_microbatch=2)
    with pytest.raises(ValueError, match=r"cannot be cut into 2 microbatches: the model is not followed"):
        wrapped(batch["input_ids"], labels=batch["labels"], roundpipe_run_config=two, **items)
    parts = RoundPipeRunConfig(num_microbatch=2, merge_output=lambda outputs: [each.loss for each in outputs])
    assert len(wrapped(**batch, roundpipe_run_config=parts, **items)) == 2


def test_tied_llama_part_by_part_warns_and_trains() -> None:
    model = llama(tie_word_embeddings=True)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="are one \\(tied\\)"):
        wrapped = wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_beside_plain(plain, wrapped, token_batches(50), lambda out: out.logits.square().mean())


ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "eager",
}


def test_bert_like_encoder() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(vocab_size=40, **ENCODER))
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, lower_threshold=512)
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1, 6:] = 0
    batches = token_batches(40, attention_mask=mask)
    train_beside_plain(
        plain, wrapped, batches, lambda out: out.last_hidden_state.square().mean() + out.pooler_output.mean()
    )


def test_vision_transformer() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **ENCODER))
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=512)
    assert isinstance(wrapped, AutoRoundPipe)
    batches = [{"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(3, (4,))} for _ in range(3)]
    train_beside_plain(plain, wrapped, batches, lambda out: out.loss, fused=True)


def test_encoder_with_a_language_models_head() -> None:
    """Wrapped part by part."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=40, tie_word_embeddings=False, **ENCODER))
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=512)
    assert isinstance(wrapped, AutoRoundPipe)
    train_beside_plain(plain, wrapped, token_batches(40), lambda out: out.logits.square().mean())


class ConvNet(nn.Module):
    """Sequentials, a list whose outputs are used by hand, so merged, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3)]
        )
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = self.stem(image) * self.scale
        for block in self.blocks:
            value = value + block(value)
        return self.head(self.pool(value).flatten(1))


def test_convolutional_net() -> None:
    model = ConvNet()
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(
        model, lower_threshold=512, override_config={"blocks": RoundPipeRunConfig(merge_output=True)}
    )
    batches = [{"image": torch.randn(4, 3, 8, 8)} for _ in range(3)]
    train_beside_plain(plain, wrapped, batches, lambda out: out.square().mean())


def test_sequential_is_one_pipeline_of_many_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model)
    assert isinstance(wrapped, RoundPipe) and wrapped.num_layers == 3
    batches = [{"input": torch.randn(4, 6)} for _ in range(3)]
    train_beside_plain(plain, wrapped, batches, lambda out: out.square().sum(), fused=True)


def test_a_skipped_part_stays_on_the_host_and_trains() -> None:
    model = ConvNet()
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(
        model,
        lower_threshold=512,
        skip_modules=["head"],
        override_config={"blocks": RoundPipeRunConfig(merge_output=True)},
    )
    assert type(wrapped.head) is nn.Linear
    batches = [{"image": torch.randn(4, 3, 8, 8)} for _ in range(3)]
    train_beside_plain(plain, wrapped, batches, lambda out: out.square().mean())


def test_a_wrapped_root_is_set_up_saved_and_cleared_as_one_model() -> None:
    roundpipe.devices("virtual:2")
    torch.manual_seed(3)
    model = wrap_model_to_roundpipe(HostRoot(), lower_threshold=1000, upper_threshold=2000)
    assert isinstance(model, AutoRoundPipe)
    assert model.eval() is model and not model.training
    assert model.train() is model and model.training
    assert model.requires_grad_() is model
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    value = torch.randn(4, 4)
    model.forward_backward((value,), loss_fn=lambda outputs, _: outputs.sum())
    model.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.step(update)  # nothing is left to step with
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model.forward_backward((value,), loss_fn=lambda outputs, _: outputs.sum())
    model.step(update)
    after = model.state_dict()  # waits for the step, for the root's own parameters, too
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    model.load_state_dict(before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class HostRoot(nn.Module):
    """A root with a parameter of its own, around a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(4, 64), *[nn.Linear(64, 64) for _ in range(3)])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.body(value * self.scale)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_fused_optimizer_steps_parts_and_host_parameters_together(is_async: bool) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(
        model, use_sequential_preset=False, lower_threshold=1024, skip_modules=[model.lm_head]
    )
    assert isinstance(wrapped, AutoRoundPipe) and wrapped._step_group.models.host_parameters
    options = {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = roundpipe.optim.AdamW(wrapped, **options)
    reference = torch.optim.AdamW(plain.parameters(), **options)
    newest = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for batch in token_batches(50):
        before = {name: p.detach().clone() for name, p in newest.items()}
        expected = plain(**batch).logits.square().mean()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        loss = wrapped(**batch).logits.square().mean()
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        step = wrapped.step(optimizer, is_async, max_grad_norm=0.5)
        assert float(step) == pytest.approx(float(norm), rel=1e-5)
        # The reference's calls read the weights of one step ago in an asynchronous run.
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(newest[name])
            reference.step()
            reference.zero_grad()
            newest = {name: p.detach().clone() for name, p in plain.named_parameters()}
            for name, p in plain.named_parameters():
                p.copy_(before[name] if is_async else newest[name])
    wrapped.synchronize()
    mine = {name.replace("_original_model.", ""): p for name, p in wrapped.named_parameters()}
    for name, p in newest.items():
        torch.testing.assert_close(
            mine[name].detach(), p, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
