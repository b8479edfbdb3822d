"""That rows of several documents, and padded ones, do not make the host wait for a card inside a microbatch."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.following.parts import OwnLayer
from roundpipe.ops.packed_attention import register

card = pytest.importorskip("fake_card", reason="the test card is not on the path; run `make test-card`")

TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3 with windows": lambda: transformers.Qwen3Config(**{**SIZES, "num_hidden_layers": 4}, head_dim=8, **WINDOWS),
}


def make(name: str, attention: str) -> Any:
    torch.manual_seed(0)
    register()
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    made = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        made["position_ids"] = torch.stack([torch.arange(TOKENS) % length for length in (5, 12, 7, 3)])
        made["labels"][made["position_ids"] == 0] = -100
    if kind == "padded":
        made["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[5], [12], [9], [3]])).long()
        made["labels"][made["attention_mask"] == 0] = -100
    return made


def step(model: Any, kind: str) -> tuple[torch.Tensor, int]:
    """The loss, and how often the host has waited for values of the card."""
    before = card.host_reads()
    loss = model.forward_backward(input_kwargs=batch(kind))
    model.synchronize()
    return loss, card.host_reads() - before


def wrap(model: Any, **options: Any) -> Any:
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=options.pop("grain", "layer"))
    return wrap_model_to_roundpipe(model, model_run_config=config, **options)


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("kind", ["whole", "packed", "padded"])
@pytest.mark.parametrize(
    ("name", "attention", "adapters"),
    [
        ("llama", "sdpa_packed", False),
        ("qwen3 with windows", "sdpa_packed", False),
        ("llama", "sdpa", False),
        ("llama", "sdpa_packed", True),
    ],
)
def test_native_models_never_wait(name: str, attention: str, adapters: bool, kind: str, grain: str) -> None:
    roundpipe.devices("card:0x2")
    model = make(name, attention)
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    wrapped = wrap(copy.deepcopy(model), native=True, grain=grain)
    step(wrapped, kind)  # the first one looks at more
    assert not wrapped.layers_are_native.reasons_around
    assert step(wrapped, kind)[1] == 0


@pytest.fixture
def reads_in_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the host has waited during the forward of each layer that runs in Python."""
    found: list[int] = []
    forward = OwnLayer.forward

    def counted(self: OwnLayer, state: Any) -> Any:
        before = card.host_reads()
        result = forward(self, state)
        found.append(card.host_reads() - before)
        return result

    monkeypatch.setattr(OwnLayer, "forward", counted)
    return found


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_in_python_do_not_wait(name: str, kind: str, reads_in_layers: list[int]) -> None:
    """In the stage of the part before them, and in the next ones."""
    roundpipe.devices("card:0")
    wrapped = wrap(make(name, "sdpa_packed"), native=False)
    step(wrapped, kind)
    assert len(reads_in_layers) > 2 * wrapped._original_model.config.num_hidden_layers
    assert not any(reads_in_layers)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_native_layers_after_a_part_in_python_do_not_wait(kind: str) -> None:
    """A hook keeps the part before the layers in Python, which waits as transformers does: as often for rows of two
    layers as for rows of six."""
    reads = []
    for layers in (2, 6):
        roundpipe.devices("card:0")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa_packed")
        model.model.embed_tokens.register_forward_hook(lambda *_: None)
        wrapped = wrap(model)
        assert wrapped.layers_are_native and wrapped.layers_are_native.reasons_around
        step(wrapped, kind)
        reads.append(step(wrapped, kind)[1])
    assert reads[0] == reads[1]
