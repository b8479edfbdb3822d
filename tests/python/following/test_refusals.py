"""What cannot be followed is refused with the reason, before anything is changed; bad batches cost nothing."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from causal_models import LENGTH, build, padded_batch, tokens
from odd_models import Between, Box, OddForCausalLM, OddLayer, odd
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeError, RoundPipeRunConfig, wrap_model_to_roundpipe


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.devices("virtual:2,debug")


def check_equal(model: OddForCausalLM) -> None:
    """Loss and gradients of the plain model, on two devices with two microbatches and by layer."""
    batch = {"input_ids": tokens(), "labels": tokens()}
    expected = model(**batch).loss
    expected.backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wrapped = wrap_model_to_roundpipe(
        model, model_run_config=RoundPipeRunConfig(num_microbatch=2, recompute_grain="layer")
    )
    assert wrapped.num_layers == 5
    torch.testing.assert_close(wrapped.forward_backward(input_kwargs=batch), expected.detach())
    wrapped.synchronize()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def in_place(model: OddForCausalLM, states: torch.Tensor, index: int) -> torch.Tensor:
    states += index
    return states


def written_into(model: OddForCausalLM, states: torch.Tensor, index: int) -> torch.Tensor:
    states = states.clone()
    states[:, 0] = 0
    return states


def without_gradient(model: OddForCausalLM, states: torch.Tensor, index: int) -> torch.Tensor:
    with torch.no_grad():
        factor = states.mean(-1, keepdim=True)
    return states * (1 + factor)


@pytest.mark.parametrize(
    "between",
    [
        lambda model, states, index: states * (index + 1) + 0.5,
        lambda model, states, index: states * model.scale,
        lambda model, states, index: states + model.first,
        lambda model, states, index: torch.cat(list(reversed(states.chunk(2, -1))), -1),
        lambda model, states, index: nn.functional.layer_norm(states, states.shape[-1:], model.scale),
        in_place,
        written_into,
        without_gradient,
    ],
    ids=["scaled", "parameter", "first", "chunks", "norm", "in_place", "written_into", "no_grad"],
)
def test_what_lies_between_layers(between: Between) -> None:
    check_equal(odd(between))


def test_layers_that_share_a_mapping() -> None:
    check_equal(odd(notes=UserDict))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: odd(lambda model, states, index: states if states.mean() > 9 else -states), "reads the values"),
        (lambda: odd(lambda model, states, index: states * states.std().item()), "reads the values"),
        (lambda: odd(lambda model, states, index: model.first.add_(states)), "into another tensor"),
        (lambda: odd(notes=list), "changes a container"),
        (lambda: odd(notes=Box), "called with a Box that keeps tensors"),
    ],
    ids=["branch", "item", "into_another", "list", "object"],
)
def test_refused_with_the_reason(model: Callable[[], OddForCausalLM], reason: str) -> None:
    plain = model()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"OddForCausalLM cannot be followed: .*{reason}.*use_sequential_preset=False"
    ):
        wrap_model_to_roundpipe(plain)
    assert plain.training and all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.layers)
    part_by_part = wrap_model_to_roundpipe(plain, use_sequential_preset=False, upper_threshold=0)
    assert isinstance(part_by_part, AutoRoundPipe)


class Leaving(OddLayer):
    """The layer that knows its source adds what the source's last call has left."""

    def __init__(self, source: list[Leaving]) -> None:
        super().__init__()
        self.source = source

    def forward(self, states: torch.Tensor, notes: Any = None) -> torch.Tensor:
        self.left = super().forward(states)
        return self.left + self.source[0].left if self.source else self.left


def test_state_outside_of_arguments_is_seen() -> None:
    model = odd()
    first = Leaving([])
    model.layers = nn.ModuleList([first, OddLayer(), Leaving([first])])
    with pytest.raises(ValueError, match=r"cannot be followed: part by part it (fails|does not compute)"):
        wrap_model_to_roundpipe(model)
    assert not hasattr(first, "left")


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = odd()
    with pytest.raises(ValueError, match="on the meta device, expected a model with values"):
        wrap_model_to_roundpipe(model)


def test_a_batch_longer_than_the_models_positions() -> None:
    for name in ("gpt2", "llama"):
        wrapped = wrap_model_to_roundpipe(build(name))
        batch = {"input_ids": tokens(2, LENGTH + 1), "labels": tokens(2, LENGTH + 1)}
        with pytest.raises(
            ValueError, match=f"{LENGTH + 1} positions, the model has max_position_embeddings = {LENGTH}"
        ):
            wrapped.forward_backward(input_kwargs=batch)
        packed = torch.arange(LENGTH + 1).remainder(LENGTH // 2 + 1).expand(2, -1)
        wrapped.forward_backward(input_kwargs={**batch, "position_ids": packed.contiguous()})
        wrapped.synchronize()


def test_labels_that_are_all_ignored() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"))
    batch = padded_batch()
    batch["labels"][:, 1:] = -100
    with pytest.raises(ValueError, match="every label of the batch is ignored"):
        wrapped.forward_backward(input_kwargs=batch)
    wrapped.forward_backward(input_kwargs=padded_batch())
    wrapped.synchronize()


def test_no_labels_and_no_loss_function() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"))
    with pytest.raises(ValueError, match="the model returned no loss"):
        wrapped.forward_backward(input_kwargs={"input_ids": tokens()})
    loss = wrapped.forward_backward((tokens(),), loss_fn=lambda outputs, _: outputs.logits.square().mean())
    assert loss > 0
    wrapped.synchronize()


def test_a_cache_is_never_made() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"))
    assert wrapped(input_ids=tokens(), use_cache=True).past_key_values is None


def test_options() -> None:
    for option in ({"loss_chunk_tokens": 0}, {"mlp_chunk_tokens": "always"}, {"loss_chunk_tokens": True}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is .*, expected 'auto', None or a number"):
            wrap_model_to_roundpipe(build("llama"), **option)


def test_a_nan_loss_is_told() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    wrapped = wrap_model_to_roundpipe(model)
    assert isinstance(wrapped, RoundPipe)
    with pytest.raises(RoundPipeError, match="NaN"):
        wrapped.forward_backward(input_kwargs=padded_batch())
