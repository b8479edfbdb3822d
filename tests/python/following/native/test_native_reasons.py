"""Which layers are native, why others are not, and that what changes later is seen."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_native_models import batch, check_plain_bits, run_plain, wrap
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import roundpipe
from dense_models import make
from gradients import check_gradients, gradients
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from sweeps import mostly_long

pytestmark = pytest.mark.usefixtures("one_device")


def reason(model: Any, **options: Any) -> str:
    """The text for a model of which no layer, or not all, are native; and its bits are those of the plain model."""
    expected, theirs = run_plain(copy.deepcopy(model), batch("padded"))
    wrapped = wrap(model, native=None, **options)
    assert not wrapped.layers_are_native
    outputs = wrapped(**batch("padded"))
    outputs.loss.backward()
    wrapped.synchronize()
    assert torch.equal(outputs.logits, expected.logits)
    check_gradients(gradients(model), theirs, exact=True)
    return str(wrapped.layers_are_native)


def register_another_attention() -> None:
    def attention(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 2, weights

    transformers.AttentionInterface.register("another", attention)
    transformers.AttentionMaskInterface.register("another", sdpa_mask)


class Louder(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def own_forward(model: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x.new_ones(*x.shape[:-1], self.intermediate_size))

    module = model.model.layers[1].mlp
    module.forward = types.MethodType(forward, module)


def subclass(model: Any) -> None:
    kind = type(model.model.layers[0])
    for layer in model.model.layers:
        layer.__class__ = type("Mine", (kind,), {})


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (
        lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
        r"1 of 2 decoder layers run natively; layer 1: mlp has hooks \(_forward_hooks\)",
    ),
    "pre-hook": (
        lambda model: model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *_: None),
        r"layer 0: self_attn.q_proj has hooks",
    ),
    "backward hook": (
        lambda model: model.model.layers[0].register_full_backward_hook(lambda *_: None),
        r"layer 0: the layer has hooks \(_backward_hooks\)",
    ),
    "own forward": (own_forward, r"layer 1: mlp has a forward of its own"),
    "subclass": (subclass, r"no layer runs natively: .*Mine has no native form"),
    "activation": (
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", Louder()),
        r"layer 0: mlp.act_fn is Louder, which has no native form",
    ),
    "linear": (
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Sequential(nn.Linear(24, 40))),
        r"layer 0: mlp.up_proj is torch.nn.modules.container.Sequential, not Linear",
    ),
    "another part": (
        lambda model: model.model.layers[0].self_attn.add_module("extra", nn.Linear(2, 2)),
        r"layer 0: self_attn.extra is a module that the class has not",
    ),
    "parametrization": (
        lambda model: nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj),
        r"layer 0: mlp.up_proj is .*ParametrizedLinear",
    ),
    "shared parameter": (
        lambda model: setattr(model.model.layers[0].mlp.up_proj, "weight", model.model.layers[0].mlp.gate_proj.weight),
        r"layer 0: two of its modules share a parameter",
    ),
    "wrong size": (  # which the layer itself does not read
        lambda model: setattr(model.model.layers[0], "hidden_size", 7),
        r"layer 0: it cannot be compared \(.*size",
    ),
    "checkpointing": (
        lambda model: model.gradient_checkpointing_enable(),
        r"no layer runs natively: gradient_checkpointing is on",
    ),
}


@pytest.mark.parametrize("name", mostly_long(CHANGES, *list(CHANGES)[::2]))
def test_changed_layers_run_in_python(name: str) -> None:
    change, expected = CHANGES[name]
    model = make("llama").train()
    change(model)
    with pytest.raises(ValueError, match=r"\[wrap_model_to_roundpipe\] native=True, but .*layer"):
        wrap(copy.deepcopy(model))
    text = reason(model)
    assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("llama", {"hidden_act": "gelu_new"}, r"mlp.act_fn is NewGELUActivation, which has no native form"),
        ("llama", {"attn_implementation": "another"}, r"the attention 'another' has no native form"),
    ],
    ids=["activation", "attention"],
)
def test_configurations_without_a_native_form(name: str, options: dict[str, Any], expected: str) -> None:
    register_another_attention()
    assert re.search(expected, reason(make(name, **options)))


def test_autocast_when_wrapping() -> None:
    """Layers of several dtypes run under autocast only."""
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = wrap(copy.deepcopy(model))
        expected = model(**batch("whole"), use_cache=False).logits
        assert torch.equal(wrapped(**batch("whole")).logits, expected)


def test_models_without_a_native_form() -> None:
    config = transformers.Olmo2Config(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    assert re.search(r"Olmo2DecoderLayer has no native form", reason(transformers.Olmo2ForCausalLM(config)))
    plain = RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not plain.layers_are_native and "transformers" in str(plain.layers_are_native)
    parts = wrap_model_to_roundpipe(make("llama"), use_sequential_preset=False)
    assert "part by part" in str(parts.layers_are_native)
    for options in ({"use_sequential_preset": False}, {}):
        model = make("llama") if options else nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"native=True, but no layer runs natively: the model is wrapped part by"):
            wrap_model_to_roundpipe(model, native=True, **options)


def test_options() -> None:
    model = make("llama")
    assert wrap(copy.deepcopy(model), native="exact").layers_are_native
    assert str(wrap(copy.deepcopy(model), native=None).layers_are_native) == "all 2 decoder layers run natively"
    off = wrap(copy.deepcopy(model), native=False).layers_are_native
    assert not off and off.reasons == {"model": "native=False"}
    with pytest.raises(ValueError, match=r"native is 'yes', expected None, True, False or 'exact'"):
        wrap(model, native="yes")


def test_another_result_than_the_layers_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rsqrt", lambda value: value.pow(-0.4))
    assert re.search(r"0 of 2 .*; layer 0: its values differ in bits from the layer's own", reason(make("llama")))


def test_replaced_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral")
    kind = type(model.model.layers[0].mlp)
    plain = kind.forward
    wrapped = wrap(copy.deepcopy(model))
    monkeypatch.setattr(kind, "forward", lambda self, x: plain(self, x) * 2)
    assert str(wrapped.layers_are_native) == "no layer runs natively: MistralMLP.forward has been replaced"
    assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)
    assert "MistralMLP.forward has been replaced" in reason(model)


def test_the_comparison_changes_nothing() -> None:
    model = make("qwen3").train()
    model.model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    wrapped = wrap(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert wrapped.layers_are_native
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.model.layers[0].training and not model.model.layers[1].mlp.training


def test_a_hook_that_comes_later_runs() -> None:
    model = make("llama")
    wrapped = wrap(model)
    expected = wrapped(**batch("whole")).logits
    seen: list[torch.Size] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert torch.equal(wrapped(**batch("whole")).logits, expected)
    assert len(seen) == 1 and "layer 1: mlp has hooks" in str(wrapped.layers_are_native)
    handle.remove()
    assert torch.equal(wrapped(**batch("whole")).logits, expected)
    assert len(seen) == 1 and wrapped.layers_are_native


def test_a_forward_that_comes_later_runs() -> None:
    model = make("llama")
    wrapped = wrap(model)
    wrapped(**batch("whole"))
    own_forward(model)
    assert torch.equal(wrapped(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)


def test_attributes_that_change_later_count() -> None:
    """The training flag, the attention of the config, and numbers that the layers read."""
    model = make("llama", attention_dropout=0.5).eval()
    wrapped = wrap(model)

    def check() -> None:
        assert torch.equal(wrapped(**batch("padded")).logits, model(**batch("padded"), use_cache=False).logits)

    before = wrapped(**batch("padded")).logits
    check()
    model.train()
    assert wrapped.layers_are_native and not torch.equal(wrapped(**batch("padded")).logits, before)
    model.eval()
    model.config._attn_implementation = "eager"
    check()
    assert wrapped.layers_are_native
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1
    model.model.layers[1].self_attn.scaling = 3.0
    check()
    assert wrapped.layers_are_native
    register_another_attention()
    model.config._attn_implementation = "another"
    check()
    assert "'another'" in str(wrapped.layers_are_native)


def test_a_parameter_that_is_replaced_later_is_refused() -> None:
    model = make("llama")
    wrapped = wrap(model)
    wrapped.forward_backward(input_kwargs=batch("whole"))
    optimizer = roundpipe.optim.SGD(wrapped, lr=0.1)
    wrapped.step(optimizer)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().clone())
    with pytest.raises(ValueError, match="were added, removed or replaced after the model was wrapped"):
        wrapped.forward_backward(input_kwargs=batch("whole"))


def test_pretrained_models(tmp_path: Any) -> None:
    model = make("qwen2", torch.bfloat16)
    model.save_pretrained(tmp_path)
    for native in (None, False):
        loaded = roundpipe.from_pretrained(tmp_path, native=native)
        assert bool(loaded.layers_are_native) is (native is None)
        assert torch.equal(loaded(**batch("whole")).logits, model(**batch("whole"), use_cache=False).logits)


def test_one_layer_that_runs_in_python_among_native_ones() -> None:
    model = make("llama", num_hidden_layers=4)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    check_plain_bits(model, batch("padded"), native=None)
