"""A native decoder layer has the bits of transformers' layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dense_models import MODELS, make
from roundpipe import _core
from roundpipe.following.native.check import reason_against_bits
from roundpipe.following.native.decoder import NativeDecoder, config_of, native_decoder
from roundpipe.ops import packed_attention
from roundpipe.ops.token_wise import TokenWise, in_chunks


def decoder_of(layer: Any) -> NativeDecoder:
    decoder = native_decoder(layer, 0)
    assert isinstance(decoder, NativeDecoder), decoder
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_values_and_gradients(name: str, attention: str, dtype: torch.dtype) -> None:
    packed_attention.register()
    model = make(name, dtype, attn_implementation=attention)
    assert [reason_against_bits(decoder_of(layer), attention) for layer in model.model.layers] == [None, None]


def test_another_configuration_is_found_out() -> None:
    layer = make("qwen3").model.layers[0]
    decoder = decoder_of(layer)
    weights = list(layer.parameters())
    hidden, table = torch.randn(2, 5, 24), torch.rand(1, 5, 8)
    expected = layer(hidden, position_embeddings=(table, table))
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        module = layer.get_submodule(norm)
        module.variance_epsilon = 0.5
        native = _core.decode(config_of(layer), decoder.names, weights, hidden, table, table, None, "sdpa")
        module.variance_epsilon = layer.self_attn.config.rms_norm_eps
        assert not torch.equal(native, expected), norm
    native = _core.decode(config_of(layer), decoder.names, weights, hidden, table, table, None, "sdpa")
    assert torch.equal(native, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_token_and_dropout(attention: str) -> None:
    """With one token and grouped heads, transformers gives sdpa other shapes; dropout draws the same numbers."""
    layer = make("llama", attn_implementation=attention, attention_dropout=0.4).model.layers[0].train()
    decoder, weights = decoder_of(layer), list(layer.parameters())
    for tokens, is_masked in itertools.product((1, 5), (False, True)):
        hidden = torch.randn(2, tokens, 24, requires_grad=True)
        table = torch.rand(1, tokens, 6)
        mask = torch.ones(2, 1, tokens, tokens).tril() if is_masked else None
        mask = mask if mask is None or attention == "eager" else mask.bool()
        results = []
        for native in (True, False):
            torch.manual_seed(3)
            output = (
                _core.decode(config_of(layer), decoder.names, weights, hidden, table, table, mask, attention)
                if native
                else layer(hidden, attention_mask=mask, position_embeddings=(table, table))
            )
            results.append([output, *torch.autograd.grad(output.square().sum(), [hidden, *weights])])
        assert all(map(torch.equal, *results)), (tokens, is_masked)


def test_chunks_of_the_mlp_are_those_of_the_operator() -> None:
    layer = make("llama").model.layers[0]
    decoder, weights = decoder_of(layer), list(layer.parameters())
    hidden, table = torch.randn(2, 7, 24), torch.rand(1, 7, 6)
    with in_chunks(layer, (TokenWise("mlp", "silu"),), 2):
        expected = layer(hidden, position_embeddings=(table, table))
    native = _core.decode(config_of(layer), decoder.names, weights, hidden, table, table, None, "sdpa", 2)
    assert torch.equal(native, expected)
    gradients = [torch.autograd.grad(output.square().sum(), weights) for output in (native, expected)]
    assert all(map(torch.equal, *gradients))
    # The chunked block is one node of the graph instead of one for each operator.
    assert type(native.grad_fn.next_functions[1][0]) is type(expected.grad_fn.next_functions[1][0])


def test_weights_that_do_not_fit_are_named() -> None:
    layer = make("qwen3").model.layers[0]
    config, weights = config_of(layer), dict(layer.named_parameters())
    hidden, table = torch.randn(2, 5, 24), torch.rand(1, 5, 8)

    def run(weights: dict[str, torch.Tensor], attention: str = "sdpa") -> None:
        _core.decode(config, list(weights), list(weights.values()), hidden, table, table, None, attention)

    run(weights)
    with pytest.raises(ValueError, match=r"'mlp.up_proj.weight' is missing"):
        run({name: weight for name, weight in weights.items() if name != "mlp.up_proj.weight"})
    with pytest.raises(ValueError, match=r"'mlp.router.weight', which such a layer has not"):
        run(weights | {"mlp.router.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"the attention is 'flex', expected one of eager, sdpa and packed"):
        run(weights, "flex")
