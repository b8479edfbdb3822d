"""Plans of several models for one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe._core import LayerCost
from roundpipe.model.call.joint_plan import RunType, plan_together


def costs(*times: float, weight_bytes: int = 100) -> list[LayerCost]:
    return [
        LayerCost(forward_ms=time, backward_ms=2 * time, weight_bytes=weight_bytes, gradient_bytes=weight_bytes)
        for time in times
    ]


def plans_of(*args: Any) -> list[ModelExecutePlan]:
    """What `plan_together` says, as plans."""
    plans = []
    for stages in plan_together(*args):
        plan = ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = stages
        plans.append(plan)
    return plans


def stage_times(plan: ModelExecutePlan, model: list[LayerCost]) -> list[float]:
    forward = [sum(model[i].forward_ms for i in stage) for stage in plan.fwd_plan]
    return forward + [sum(model[i].forward_ms + model[i].backward_ms for i in stage) for stage in plan.bwd_plan]


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_no_stage_is_longer_than_the_longest_layer_of_all_allows(run_type: RunType) -> None:
    models = [costs(*[1.0] * 12), costs(*[1.0] * 4, 4.0)]
    plans = plans_of(run_type, models, 1, 1.1, [0, 0])
    longest = 4.0 if run_type == "infer" else 12.0
    for position, (plan, model) in enumerate(zip(plans, models, strict=True)):
        called: RunType = "train" if run_type == "fused" and position == 0 else run_type
        plan.check_valid(len(model), called)
        assert max(stage_times(plan, model)) <= 1.1 * longest + 1e-6
    # The small layers of the first model share stages, as the second one's head sets the pace.
    assert len(plans[0].fwd_plan) == (3 if run_type == "infer" else 1)


def test_stages_keep_to_the_bytes() -> None:
    (plan,) = plans_of("train", [costs(1.0, 1.0, 1.0, 100.0)], 1, 1.1, [200])
    assert plan.fwd_plan == [range(2), range(2, 4)] or max(map(len, plan.fwd_plan)) <= 2
    assert all(len(stage) == 1 for stage in plan.bwd_plan)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_two_models_train_with_plans_made_together(devices: int) -> None:
    roundpipe.devices(f"virtual:{devices}")
    torch.manual_seed(0)
    first, second = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)]) for n in (5, 3))
    a, b = (RoundPipe(m, model_run_config=RoundPipeRunConfig(num_microbatch=2)) for m in (first, second))
    x = torch.randn(4, 4)
    whole: Any = nn.Sequential(*first, *second)
    whole(x).square().mean().backward()
    expected = [p.grad.clone() for p in whole.parameters()]
    for p in whole.parameters():
        p.grad = None
    for _ in range(2):  # with estimated costs, then with measured ones
        one, two = ModelExecutePlan.auto("fused", a, b)
        one.check_valid(5, "train")
        two.check_valid(3, "fused")
        packed = a(x, roundpipe_run_config=RoundPipeRunConfig(execute_plan=one, merge_output=False))
        loss = b.forward_backward(
            (packed,),
            loss_fn=lambda o, _: o.square().mean() / 2,
            run_config=RoundPipeRunConfig(execute_plan=two),
        )
        torch.testing.assert_close(loss, whole(x).square().mean().detach())
        a.synchronize()
        b.synchronize()
        for p, gradient in zip(whole.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)
            p.grad = None
