"""How often layers compute in a step, by the matrix products of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

import roundpipe
from reference_loops import use_devices
from roundpipe.model.call.run_config import RecomputeGrain
from sweeps import mostly_long

pytestmark = pytest.mark.timeout(120)

LAYERS = 4
MICROBATCHES = 2
VOCABULARY = 512  # no size of a layer
FORWARD, BACKWARD = 7, 14


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).train()


def products_of_layers(run: Callable[[], None]) -> int:
    """The matrix products that `run` makes, without the head's."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    events = [event for event in profiled.events() if event.name in ("aten::mm", "aten::addmm")]
    return sum(not any(VOCABULARY in shape for shape in event.input_shapes if shape) for event in events)


def plan_with(backward: list[int]) -> roundpipe.ModelExecutePlan:
    """Backward stages of so many layers below a fused head; the embedding is the first layer."""
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan = [range(layer, layer + 1) for layer in range(LAYERS + 1)]
    plan.bwd_plan = [range(LAYERS + 1, LAYERS + 2)]
    end = LAYERS + 1
    for size in backward:
        plan.bwd_plan.append(range(end - size, end))
        end -= size
    return plan


def step_of(native: bool, grain: RecomputeGrain, plan: roundpipe.ModelExecutePlan | None) -> Callable[[], None]:
    wrapped = roundpipe.wrap_model_to_roundpipe(model(), native=native)
    ids = torch.arange(64).reshape(2, 32) % VOCABULARY
    config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES, recompute_grain=grain, execute_plan=plan)

    def step() -> None:
        wrapped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config)
        wrapped.synchronize()

    return step


@pytest.mark.parametrize(
    ("native", "grain", "backward"),
    [
        pytest.param(True, "stage", [1] * (LAYERS + 1), marks=pytest.mark.long),
        (False, "stage", [1] * (LAYERS + 1)),
        (True, "layer", [LAYERS, 1]),
        pytest.param(False, "layer", [LAYERS, 1], marks=pytest.mark.long),
        (True, "layer", None),
        pytest.param(True, "layer", [1] * (LAYERS + 1), marks=pytest.mark.long),
        pytest.param(True, "layer", [LAYERS + 1], marks=pytest.mark.long),
        pytest.param(True, "layer", [2, 3], marks=pytest.mark.long),
    ],
)
def test_a_layer_runs_forward_twice_and_natively_without_what_its_backward_does_not_read(
    native: bool, grain: RecomputeGrain, backward: list[int] | None
) -> None:
    use_devices(1)
    step = step_of(native, grain, None if backward is None else plan_with(backward))
    step()
    recompute = FORWARD - 1 if native else FORWARD
    of_layer = FORWARD + recompute + BACKWARD
    made = products_of_layers(step)
    if backward is None:  # the planner may keep what layers beside the head have computed
        assert made <= LAYERS * MICROBATCHES * of_layer
        assert made >= LAYERS * MICROBATCHES * (FORWARD + BACKWARD)
    else:
        assert made == LAYERS * MICROBATCHES * of_layer


@pytest.mark.parametrize("size", mostly_long([2, LAYERS], LAYERS))
def test_a_longer_stage_leaves_out_the_last_product_of_its_last_layer(size: int) -> None:
    use_devices(1)
    step = step_of(True, "stage", plan_with([size] * (LAYERS // size) + [1]))
    step()
    stages = LAYERS // size
    assert products_of_layers(step) == MICROBATCHES * (LAYERS * (2 * FORWARD + BACKWARD) - stages)


@pytest.mark.parametrize("grain", mostly_long(["stage", "layer"], "stage"))
def test_what_a_fused_stage_keeps_is_not_computed_again(grain: RecomputeGrain) -> None:
    use_devices(1)
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan = [range(1)]
    plan.bwd_plan = [range(1, LAYERS + 2), range(1)]
    step = step_of(True, grain, plan)
    step()
    again = 0 if grain == "stage" else FORWARD - 1
    assert products_of_layers(step) == MICROBATCHES * LAYERS * (FORWARD + again + BACKWARD)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_given_plan_of_long_stages_has_single_layers_where_layers_are_recomputed_one_by_one(devices: int) -> None:
    use_devices(devices)
    wrapped = roundpipe.wrap_model_to_roundpipe(model())
    ids = torch.arange(64).reshape(2, 32) % VOCABULARY

    def sizes() -> list[int]:
        plan = wrapped.last_plan()
        assert plan is not None
        return [job.layers.last - job.layers.first for job in plan.jobs if job.phase == "backward"]

    def gradients(grain: RecomputeGrain) -> list[torch.Tensor]:
        wrapped.zero_grad()
        config = roundpipe.RoundPipeRunConfig(
            num_microbatch=MICROBATCHES, recompute_grain=grain, execute_plan=plan_with([LAYERS + 1])
        )
        wrapped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config)
        wrapped.synchronize()
        return [parameter.grad.clone() for parameter in wrapped.parameters() if parameter.grad is not None]

    by_stage = gradients("stage")
    assert sizes() == [LAYERS + 1]
    by_layer = gradients("layer")
    assert sizes() == [1] * (LAYERS + 1)
    assert all(torch.equal(a, b) for a, b in zip(by_stage, by_layer, strict=True))
