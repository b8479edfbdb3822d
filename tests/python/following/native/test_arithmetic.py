"""Fast arithmetic: near the true results, the same bits in any layout, and fewer bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import moe_models
import roundpipe
from dense_models import BASE, MODELS, make
from gradients import gradients
from roundpipe import RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.following.native.check import reason_against_bits
from roundpipe.following.native.decoder import NativeDecoder, config_of, native_decoder
from roundpipe.ops.packed_attention import register
from roundpipe.plan.shape_meter import ShapeMeter

HEAD_DIM, WIDTH, INNER, HEADS, KEY_HEADS = 128, 2048, 6144, 16, 8
MIXTURES = list(moe_models.MODELS)


def decoder_of(layer: Any, arithmetic: Any = "fast") -> NativeDecoder:
    decoder = native_decoder(layer, 0, arithmetic)
    assert isinstance(decoder, NativeDecoder), decoder
    return decoder


def any_model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return moe_models.make(name, dtype, **more) if name in MIXTURES else make(name, dtype, **more)


def work_of_a_layer(arithmetic: Any, tokens: int = 64) -> tuple[_core.LayerWork, _core.LayerWork, int]:
    """Of a layer of Qwen3-1.7B in bf16, forward and backward."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "head_dim": HEAD_DIM}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "num_hidden_layers": 1}
    heads["attention_bias"] = False
    layer = make("qwen3", torch.bfloat16, **sizes, **heads).model.layers[0]
    names, weights = zip(*layer.named_parameters(), strict=True)
    hidden = torch.randn(1, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    table = torch.rand(1, tokens, HEAD_DIM).bfloat16()
    with ShapeMeter([]) as forward:
        output = _core.decode(config_of(layer, arithmetic), names, weights, hidden, table, table, None, "sdpa")
    given = torch.ones_like(output)
    with ShapeMeter([]) as backward:
        torch.autograd.grad(output, [hidden, *weights], given)
    return forward.work, backward.work, tokens


@pytest.mark.long
def test_bytes_and_kernels_of_a_token() -> None:
    forward, backward, tokens = work_of_a_layer("fast")
    assert forward.element_bytes <= 100e3 * tokens and forward.element_kernels <= 8
    assert backward.element_bytes <= 175e3 * tokens and backward.element_kernels <= 11
    exact_forward, exact_backward, _ = work_of_a_layer("exact")
    assert (
        exact_forward.element_bytes > 4 * forward.element_bytes
        and exact_backward.element_bytes > 5 * backward.element_bytes
    )


# What chooses (routers, relu, bounds) may choose otherwise after a rounding to 16 bits.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in (*MODELS, *MIXTURES)]
    + [(name, dtype) for name in MODELS for dtype in (torch.bfloat16, torch.float16) if name != "llama no groups"],
    ids=str,
)
def test_as_near_to_fp64_as_the_exact_form(name: str, dtype: torch.dtype) -> None:
    model = any_model(name, dtype)
    layer = model.model.layers[0]
    decoder = decoder_of(layer)
    table = decoder.layer.self_attn.head_dim // (2 if name.startswith("gpt_oss") else 1)
    attention = "eager" if name.startswith("gpt_oss") else "sdpa"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, layer.hidden_size, generator=generator).to(dtype)
    angles = torch.rand(1, 7, table, generator=generator)
    mask = torch.full((7, 7), -1e4).triu(1).expand(2, 1, 7, 7) if attention == "eager" else None
    given = torch.randn(hidden.shape, generator=generator).to(dtype)

    def results(arithmetic: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        weights = [w.detach().to(dtype).requires_grad_() for w in layer.parameters()]
        start = hidden.detach().to(dtype).requires_grad_()
        cos, sin = (wave.to(hidden.dtype).to(dtype) for wave in (angles.cos(), angles.sin()))
        seen = None if mask is None else mask.to(dtype)
        experts = "batched_mm" if decoder.has_experts else None
        config = config_of(layer, arithmetic)
        found = _core.decode(config, decoder.names, weights, start, cos, sin, seen, attention, experts=experts)
        return [found, *torch.autograd.grad(found, [start, *weights], given.to(dtype), materialize_grads=True)]

    true = results("exact", torch.float64)
    distances = [
        [torch.linalg.vector_norm(a.double() - b) for a, b in zip(results(form, dtype), true, strict=True)]
        for form in ("fast", "exact")
    ]
    sizes = [torch.linalg.vector_norm(each) for each in true]
    rounding = torch.finfo(dtype).eps
    for fast, exact, size in zip(*distances, sizes, strict=True):
        assert fast <= 1.5 * exact + 3 * rounding * size


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_the_comparison_of_wrapping_accepts_it(name: str) -> None:
    register()
    for dtype in (torch.float32, torch.bfloat16):
        attention = "eager" if name.startswith("gpt_oss") else "packed"
        model = any_model(name, dtype, attn_implementation="eager" if attention == "eager" else "packed")
        experts = "grouped_mm" if name in MIXTURES else None
        assert reason_against_bits(decoder_of(model.model.layers[0]), attention, experts) is None


def batch(rows: int = 4, tokens: int = 11) -> dict[str, Any]:
    ids = torch.randint(1, BASE["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids.clone()}


def wrap(model: Any, arithmetic: str = "fast", microbatches: int = 2, **options: Any) -> Any:
    config = RoundPipeRunConfig(num_microbatch=microbatches, **options.pop("config", {}))
    return wrap_model_to_roundpipe(model, model_run_config=config, arithmetic=arithmetic, **options)


def trained(model: Any, arithmetic: str = "fast", **options: Any) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    """A step by a fused optimizer, and the gradients of the call after it."""
    own = copy.deepcopy(model)
    wrapped = wrap(own, arithmetic, native=True, **options)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2)
    losses = [float(wrapped.forward_backward(input_kwargs=batch()))]
    wrapped.step(optimizer)
    losses.append(float(wrapped.forward_backward(input_kwargs=batch())))
    wrapped.synchronize()
    return wrapped, losses, gradients(own)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_the_same_bits_on_any_devices(name: str) -> None:
    model = any_model(name, torch.bfloat16)
    expected: Any = None
    for devices, grain in ((1, "stage"), (3, "layer"), (4, "stage")):
        roundpipe.devices(f"virtual:{devices},debug")
        _, losses, found = trained(model, config={"recompute_grain": grain})
        expected = expected or (losses, found)
        assert losses == expected[0]
        assert found.keys() == expected[1].keys() and all(torch.equal(found[n], expected[1][n]) for n in found)
    roundpipe.devices("virtual:1")
    _, losses, found = trained(model, "exact")
    assert losses == pytest.approx(expected[0], rel=1e-2)
    assert not all(torch.equal(found[n], expected[1][n]) for n in found)  # another form has computed


@pytest.mark.parametrize(("groups", "fault"), [(1, "0:error@2"), (2, "1:error@7")])
def test_lost_devices_and_gradient_groups(groups: int, fault: str) -> None:
    model = make("qwen3", torch.bfloat16)
    config = {"fault_tolerant": True, "gradient_groups": groups}
    roundpipe.devices("virtual:1")
    _, losses, expected = trained(model, config=dict(config), microbatches=4)
    pool = roundpipe.devices(f"virtual:3,fail={fault}")
    _, own, found = trained(model, config=dict(config), microbatches=4)
    assert own == losses and all(torch.equal(found[name], expected[name]) for name in expected)
    assert list(pool.failed) == [f"virtual:{fault[0]}"]


def test_a_loss_in_chunks() -> None:
    model = make("llama", torch.bfloat16)
    roundpipe.devices("virtual:2")
    _, whole, _ = trained(model)
    _, chunked, found = trained(model, loss_chunk_tokens=5)
    _, exact, expected = trained(model, "exact", loss_chunk_tokens=5)
    assert chunked == pytest.approx(whole, rel=1e-2) and chunked == pytest.approx(exact, rel=1e-2)
    assert not torch.equal(found["lm_head.weight"], expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("side", "name"), [("right", "llama"), ("left", "qwen3_moe"), ("right with labels", "llama")], ids=str
)
def test_padding_that_nobody_reads_needs_no_mask(name: str, side: str) -> None:
    model = any_model(name)
    given = batch()
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    padding = slice(-4, None) if side.startswith("right") else slice(0, 4)
    given["attention_mask"][1:3, padding] = 0
    if side != "right with labels":
        given["labels"][given["attention_mask"] == 0] = -100
    roundpipe.devices("virtual:2")
    results = []
    for form in ("fast", "exact"):
        own = copy.deepcopy(model)
        wrapped = wrap(own, form, native=True)
        loss = wrapped.forward_backward(input_kwargs=given)
        wrapped.synchronize()
        results.append((float(loss), gradients(own)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for parameter, gradient in results[1][1].items():
        torch.testing.assert_close(results[0][1][parameter], gradient, rtol=1e-3, atol=1e-5)
    ids, mask, labels = given["input_ids"], given["attention_mask"], given["labels"]
    documents = _core.find_documents(mask, None, *ids.shape, labels)
    places = _core.EmbeddingCall(0, 1, None, [], "sdpa", 2)
    table = torch.ones(31, 4), torch.ones(2)
    found = []
    for form in ("fast", "exact"):
        config = _core.EmbeddingConfig(padding_index=-1, rotary_scaling=1.0, rotary_halves=False, arithmetic=form)
        found.append(_core.embed(config, places, *table, [ids, mask], documents)[3].numel() == 0)
    assert found == [side == "right", False]


@pytest.mark.parametrize("chunk", [None, 0, 2])
def test_a_mean_over_no_label_is_what_it_is_in_the_exact_form(chunk: int | None) -> None:
    hidden, norm, weight = torch.randn(1, 5, 8), torch.ones(8), torch.randn(11, 8)
    call = _core.HeadCall(0, 1, None, None, False, chunk, 0, 2)
    losses = []
    for form in ("fast", "exact"):
        config = _core.HeadConfig(norm_eps=1e-6, scales_norm_in_float=False, arithmetic=form)
        inputs = [hidden, torch.full((1, 5), -100)]
        losses.append(_core.apply_head(config, call, norm, weight, None, inputs)[0])
    assert bool(losses[0].isnan()) == bool(losses[1].isnan()) == (chunk != 2)


def test_logits_of_padding_are_the_exact_ones() -> None:
    """Where logits are read, so are those of padding."""
    model = make("llama")
    given = batch()
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][1:3, -4:] = 0
    given["labels"][given["attention_mask"] == 0] = -100
    roundpipe.devices("virtual:1")
    fast, exact = (wrap(copy.deepcopy(model), form)(**given).logits for form in ("fast", "exact"))
    torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)


def test_layers_in_python_have_their_bits_and_say_so() -> None:
    model = make("qwen3")
    roundpipe.devices("virtual:1")
    wrapped = [wrap(copy.deepcopy(model), form, native=False) for form in ("fast", "exact")]
    losses = [each.forward_backward(input_kwargs=batch()) for each in wrapped]
    assert torch.equal(*losses)
    assert str(wrapped[0].layers_are_native) == (
        "no layer runs natively: native=False; they compute exactly, and only losses in chunks do not"
    )
    python_chunks = wrap(copy.deepcopy(model), "fast", native=False, loss_chunk_tokens=5)
    native_chunks = wrap(copy.deepcopy(model), "exact", loss_chunk_tokens=5)
    loss, exact = (each.forward_backward(input_kwargs=batch()) for each in (python_chunks, native_chunks))
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)


# Rows of norms that the kernels do not take, and little beside them.
WIDE = {"hidden_size": 8200, "intermediate_size": 8, "head_dim": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("name", "dtype", "options", "said"),
    [
        ("qwen3", torch.float32, {}, "all 2 decoder layers run natively, in fast arithmetic"),
        ("qwen3", torch.float64, {}, "(exact: all of it, since the weights are Double)"),
        ("llama one key head", torch.float32, {}, "(exact: gates, since their activation is not silu)"),
        ("qwen3_moe all", torch.bfloat16, {}, "(exact: gates, since their activation is not silu)"),
        ("llama", torch.bfloat16, WIDE, "(exact: norms, since one has"),
    ],
    ids=str,
)
def test_what_computes_is_said(name: str, dtype: torch.dtype, options: dict[str, Any], said: str) -> None:
    roundpipe.devices("virtual:1")
    wrapped = wrap(any_model(name, dtype, **options))
    assert said in str(wrapped.layers_are_native) and bool(wrapped.layers_are_native)
    prediction = wrapped.predict_memory(input_kwargs=batch())
    assert said in str(prediction)


def test_fp64_has_the_exact_bits() -> None:
    roundpipe.devices("virtual:1")
    found = []
    for form in ("fast", "exact"):
        model = make("qwen3", torch.float64)
        wrapped = wrap(model, form)
        loss = wrapped.forward_backward(input_kwargs=batch())
        wrapped.synchronize()
        found.append({"loss": loss, **gradients(model)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_autocast() -> None:
    """Dtypes that the kernels do not take together compute exactly, operator by operator."""
    roundpipe.devices("virtual:2")
    model = make("qwen3")
    losses = []
    for form in ("fast", "exact"):
        wrapped = wrap(copy.deepcopy(model), form, native=True)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(wrapped.forward_backward(input_kwargs=batch())))
            assert wrap(copy.deepcopy(model), form).layers_are_native  # the comparison is not in bf16
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[arithmetic\] the arithmetic is 'quick', expected exact or fast"):
        wrap(make("qwen3"), "quick")
    with pytest.raises(ValueError, match="native='exact' asks for the bits of the Python layers"):
        wrap(make("qwen3"), "fast", native="exact")
