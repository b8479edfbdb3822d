"""What a wrapped model may not become, or be made of: said by name, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DogeConfig, DogeForCausalLM

import roundpipe
from causal_models import build, padded_batch, tokens
from gradients import check_gradients, gradients
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.data.batches import Batches

SIZE = 110


pytestmark = pytest.mark.usefixtures("two_devices")


def test_resized_embeddings_are_followed_anew() -> None:
    model = build("llama")
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    wrapped.resize_token_embeddings(SIZE)
    batch = {"input_ids": tokens(4) + SIZE - 97, "labels": tokens(4) + SIZE - 97}
    reference = copy.deepcopy(model)
    expected = reference(**batch).loss
    expected.backward()
    assert torch.equal(wrapped.forward_backward(input_kwargs=batch), expected.detach())
    wrapped.synchronize()
    check_gradients(gradients(model), gradients(reference), exact=True)


def test_resizing_after_a_batch_is_refused() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"), model_run_config=RoundPipeRunConfig(num_microbatch=1))
    wrapped.forward_backward(input_kwargs=padded_batch())
    wrapped.resize_token_embeddings(SIZE)
    with pytest.raises(ValueError, match="were resized after batches were trained"):
        wrapped.forward_backward(input_kwargs=padded_batch())


@pytest.mark.parametrize("make", [roundpipe.optim.AdamW, lambda model: list(model.optim_parameters())])
def test_resizing_after_an_optimizer_changes_nothing(make: Callable[[Any], Any]) -> None:
    model = build("llama")
    wrapped = wrap_model_to_roundpipe(model)
    optimizer = make(wrapped)
    before = model.get_input_embeddings().weight
    with pytest.raises(ValueError, match=r"\[resize_token_embeddings\] .*before an optimizer is made"):
        wrapped.resize_token_embeddings(SIZE)
    assert model.get_input_embeddings().weight is before and model.config.vocab_size == 97
    assert optimizer is not None and wrapped.forward_backward(input_kwargs=padded_batch()) > 0
    wrapped.synchronize()


def compiled_around(model: nn.Module) -> nn.Module:
    model.model = torch.compile(model.model, backend="eager")  # type: ignore[arg-type]
    return model


def compiled_itself(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compiled_around, compiled_itself]
)
def test_models_compiled_as_a_whole(compiled: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"is compiled as a whole, .*for layer in layers: layer.compile\(\)"):
        wrap_model_to_roundpipe(compiled(build("llama")))


def test_compiling_a_wrapped_model() -> None:
    with pytest.raises(ValueError, match=r"\[compile\] the model is in the pipeline.*compile each layer"):
        wrap_model_to_roundpipe(build("llama")).compile()


@pytest.mark.long
def test_compiled_layers() -> None:
    """Devices trace one at a time: what one traces sees flags of the process that others must not."""
    model = build("llama")
    reference = copy.deepcopy(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    expected = reference(**padded_batch()).loss
    expected.backward()
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    loss = wrapped.forward_backward(input_kwargs=padded_batch())
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    mine = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(model).items()}
    check_gradients(mine, gradients(reference), exact=False)


class Packed(torch.Tensor):
    """Like the weights of libraries that quantise: a tensor whose numbers are not what its storage holds."""


@pytest.mark.parametrize("wrap", [wrap_model_to_roundpipe, RoundPipe])
def test_weights_that_are_no_plain_tensors(wrap: Callable[[nn.Module], Any]) -> None:
    model = build("llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Packed))
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is a .*Packed, expected a plain"):
        wrap(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_that_mixes_rows_is_named(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    options |= {"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4, "pad_token_id": 0}
    model = DogeForCausalLM(DogeConfig(**options, is_moe=True)).to(dtype)
    with pytest.raises(ValueError, match=r"DogeForCausalLM mixes the rows of a batch .*set num_microbatch=1"):
        wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    with pytest.warns(UserWarning, match=r"DogeForCausalLM mixes the rows .*run as one microbatch"):
        wrapped = wrap_model_to_roundpipe(model)
    batch = {"input_ids": tokens(4), "labels": tokens(4)}
    expected = copy.deepcopy(model)(**batch).loss
    torch.testing.assert_close(wrapped.forward_backward(input_kwargs=batch), expected.detach())
    wrapped.synchronize()


@pytest.mark.parametrize("name", [None, "stack-2.5"])
def test_a_single_layer_of_many_is_told(name: str | None) -> None:
    class Stack(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.warns(UserWarning, match=r"Stack becomes a single layer of \d+ bytes: each device has to hold all"):
        wrapped = RoundPipe(Stack(512), name=name)
    assert bool(wrapped) and wrapped.num_layers == 1


def test_elements_of_a_list_are_true() -> None:
    wrapped = RoundPipe(nn.Linear(2, 2))
    assert wrapped


def test_padding_has_no_positions_of_its_own() -> None:
    """Rows of many short samples, the last row mostly padding: no position beyond those of the samples."""
    samples = [{"input_ids": list(range(3, 3 + size))} for size in (40, 40, 40, 40, 7)]
    wrapped = wrap_model_to_roundpipe(build("llama"))
    for batch in Batches(samples, batch_tokens=400, max_length=160, pad_token_id=0):
        assert batch["input_ids"].shape == (2, 160) and int(batch["position_ids"].max()) == 39
        assert wrapped.forward_backward(input_kwargs=batch) > 0
    wrapped.synchronize()
