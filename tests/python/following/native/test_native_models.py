"""Models with native layers: plain transformers' bits in one microbatch, and the Python layers' bits in several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import roundpipe
from dense_models import BASE, MODELS, make
from gradients import check_gradients, gradients
from reference_loops import plan_of
from roundpipe import RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.ops.packed_attention import register
from sweeps import sweep

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["whole", "padded", "packed"]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 2.0, 1.5],
        "long_factor": [3.0, 1.0, 2.0],
    },
}


def batch(kind: str, rows: int = 3, tokens: int = 11) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, BASE["vocab_size"], (rows, tokens), generator=generator)
    made = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :4], mask[1, -3:] = 0, 0
        made["attention_mask"] = mask
        made["labels"][mask == 0] = -100
    if kind == "packed":
        made["position_ids"] = torch.cat([torch.arange(4), torch.arange(tokens - 4)]).repeat(rows, 1)
        made["labels"][:, 4] = -100
    return made


def run_plain(model: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    outputs = model(**arguments, use_cache=False)
    outputs.loss.backward()
    return outputs, gradients(model)


def wrap(model: Any, microbatches: int = 1, **options: Any) -> Any:
    config = RoundPipeRunConfig(num_microbatch=microbatches, **options.pop("config", {}))
    return wrap_model_to_roundpipe(model, model_run_config=config, **{"native": True, **options})


def trained(model: Any, arguments: dict[str, Any], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    wrapped = wrap(model, **options)
    outputs = wrapped(**arguments)
    outputs.loss.backward()
    wrapped.synchronize()
    return outputs, gradients(model)


def check_plain_bits(model: Any, arguments: dict[str, Any], **options: Any) -> None:
    expected, theirs = run_plain(copy.deepcopy(model), arguments)
    outputs, mine = trained(model, arguments, **options)
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits)
    check_gradients(mine, theirs, exact=True)


def native_and_python(
    model: Any, arguments: dict[str, Any], calls: int = 1, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The losses of so many calls with native layers, and with Python layers; their gradients have the same bits."""
    losses, found = [], []
    for native in (True, False):
        mine = copy.deepcopy(model)
        wrapped = wrap(mine, native=native, **options)
        losses.append([wrapped.forward_backward(input_kwargs=arguments) for _ in range(calls)])
        wrapped.synchronize()
        found.append(gradients(mine))
    check_gradients(*found, exact=True)
    return losses[0], losses[1]


@sweep(
    "name,attention,dtype,kind,tied,devices",
    MODELS,
    ["eager", "sdpa", "sdpa_packed"],
    DTYPES,
    KINDS,
    [False, True],
    [1, 2, 3],
    ids=str,
    together=1,
)
def test_one_microbatch_has_the_plain_models_bits(
    name: str, attention: str, dtype: torch.dtype, kind: str, tied: bool, devices: int
) -> None:
    roundpipe.devices(f"virtual:{devices},debug")
    register()
    model = make(name, dtype, attn_implementation=attention, tie_word_embeddings=tied)
    check_plain_bits(model, batch(kind))


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_positions(rope: str) -> None:
    roundpipe.devices("virtual:2")
    parameters = {"rope_type": rope, "rope_theta": 100.0, **ROPES[rope]}
    check_plain_bits(make("llama", rope_parameters=parameters), batch("whole"))


@sweep("name,kind,dtype,grain", MODELS, KINDS, DTYPES, ["stage", "layer"], ids=str, together=0)
def test_several_microbatches_have_the_python_layers_bits(name: str, kind: str, dtype: torch.dtype, grain: Any) -> None:
    roundpipe.devices("virtual:2")
    model = make(name, dtype).train()
    options: Any = {"microbatches": 3, "config": {"recompute_grain": grain}}
    (native,), (python,) = native_and_python(model, batch(kind, rows=5), **options)
    assert torch.equal(native, python)


def test_chunks_of_loss_and_mlp_have_the_python_layers_bits() -> None:
    roundpipe.devices("virtual:1")
    model = make("qwen3", torch.bfloat16)
    (native,), (python,) = native_and_python(model, batch("padded"), loss_chunk_tokens=4, mlp_chunk_tokens=3)
    assert torch.equal(native, python)


def test_dropout_draws_the_same_numbers() -> None:
    roundpipe.devices("virtual:2")
    model = make("llama", attention_dropout=0.3).train()
    native, python = native_and_python(model, batch("whole"), calls=2, microbatches=2, name="one name for the seeds")
    assert all(map(torch.equal, native, python))
    assert not torch.equal(native[0], native[1])


def test_autocast() -> None:
    roundpipe.devices("virtual:2")
    model = make("qwen2")
    found = []
    for native in (True, False):
        mine = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16):
            outputs, ours = trained(mine, batch("padded"), native=native)
        found.append((outputs.logits, ours))
    assert found[0][0].dtype == torch.bfloat16 and torch.equal(found[0][0], found[1][0])
    check_gradients(found[0][1], found[1][1], exact=True)


def test_frozen_weights() -> None:
    roundpipe.devices("virtual:2")
    model = make("mistral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "layers.1.mlp" in name)
    check_plain_bits(model, batch("whole"))


def test_outputs_of_every_layer_come_from_python() -> None:
    """transformers collects hidden states in hooks on the layers, which native ones have not."""
    roundpipe.devices("virtual:1")
    model = make("llama", attn_implementation="eager")
    arguments = {**batch("whole"), "output_hidden_states": True, "output_attentions": True}
    expected = copy.deepcopy(model)(**arguments, use_cache=False)
    outputs = wrap(model)(**arguments)
    assert len(outputs.hidden_states) == len(expected.hidden_states) == 3
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))
    assert all(map(torch.equal, outputs.attentions, expected.attentions))


def taken_by_a_step(model: Any, layers: int, native: bool) -> int:
    """How often the engine takes the interpreter lock in one training step, after two that make all there is."""
    wrapped = wrap(model, microbatches=2, native=native, config=fixed_plan(layers))
    taken = []
    for _ in range(6):
        before = _core.interpreter_lock_acquisitions()
        wrapped.forward_backward(input_kwargs=batch("whole", rows=2))
        wrapped.synchronize()
        taken.append(_core.interpreter_lock_acquisitions() - before)
    return min(taken[2:])  # a value of one call may be dropped in the next


def fixed_plan(layers: int) -> dict[str, Any]:
    return {"execute_plan": plan_of(layers + 2, list(range(1, layers + 2)), list(range(1, layers + 2)), fused=True)}


def test_layers_do_not_take_the_interpreter_lock() -> None:
    """Each layer is a stage of its own, so a Python layer takes the lock in each forward and recompute."""
    roundpipe.devices("virtual:1")
    # Twelve more layers in two microbatches, forward and recompute. What a layer is asked before a step is in both.
    more_native, more_python = (
        taken_by_a_step(make("llama", num_hidden_layers=16), 16, native)
        - taken_by_a_step(make("llama", num_hidden_layers=4), 4, native)
        for native in (True, False)
    )
    assert more_python - more_native >= 12 * 2 * 2
