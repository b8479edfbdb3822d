from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from roundpipe import RoundPipe
from roundpipe.model.call.execute_plan import ModelExecutePlan, RunType
from roundpipe.model.call.run_config import RoundPipeRunConfig


def plan(fwd: list[Any], bwd: list[Any] | None = None) -> ModelExecutePlan:
    result = ModelExecutePlan()
    result.fwd_plan, result.bwd_plan = fwd, bwd or []
    return result


@pytest.mark.parametrize(
    ("run_type", "valid"),
    [
        ("infer", plan([range(3), range(3, 5)])),
        ("infer", plan([range(5)], [range(9)])),  # backward is not looked at
        ("train", plan([range(2), range(2, 5)], [range(3, 5), range(1, 3), range(1)])),
        ("fused", plan([range(2), range(2, 3)], [range(3, 5), range(3)])),
        ("fused", plan([], [range(5)])),
    ],
)
def test_valid(run_type: RunType, valid: ModelExecutePlan) -> None:
    valid.check_valid(5, run_type)


@pytest.mark.parametrize(
    ("run_type", "invalid", "message"),
    [
        ("infer", plan([]), r"fwd_plan: layers \[0, 5\) are missing"),
        ("infer", plan([range(2), range(3, 5)]), r"fwd_plan: layers \[2, 3\) are missing"),
        ("infer", plan([range(3), range(2, 5)]), r"range\(2, 5\) overlaps"),
        ("infer", plan([range(3), range(3, 3), range(3, 5)]), r"range\(3, 3\) is empty"),
        ("infer", plan([range(3, 5), range(3)]), "wrong order"),
        ("infer", plan([range(0, 6, 2)]), "has step 2"),
        ("infer", plan([range(4, -1, -1)]), "has step -1"),
        ("infer", plan([range(6)]), "beyond layer 5"),
        ("infer", plan([range(4)]), r"layers \[4, 5\) are missing"),
        ("infer", plan([[0, 1, 2, 3, 4]]), "is a list, not a range"),
        ("train", plan([range(5)]), r"bwd_plan: layers \[0, 5\) are missing"),
        ("train", plan([range(5)], [range(2), range(2, 5)]), "bwd_plan: .*wrong order"),
        ("train", plan([range(3)], [range(3, 5), range(3)]), r"fwd_plan: layers \[3, 5\) are missing"),
        ("fused", plan([range(5)], [range(3, 5), range(3)]), "fwd_plan: .*beyond layer 3"),
        ("fused", plan([range(2)], [range(3, 5), range(3)]), r"fwd_plan: layers \[2, 3\) are missing"),
        ("fused", plan([range(3)], [range(3, 5), range(1, 3)]), r"bwd_plan: layers \[0, 1\) are missing"),
    ],
)
def test_invalid(run_type: RunType, invalid: ModelExecutePlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        invalid.check_valid(5, run_type)


def test_unknown_run_type() -> None:
    with pytest.raises(ValueError, match="expected one of infer, train, fused"):
        plan([range(5)]).check_valid(5, "eval")  # type: ignore[arg-type]


def test_the_number_of_layers_comes_first() -> None:
    with pytest.raises(ValueError, match=r"num_layers is 'infer', expected a number"):
        plan([range(5)]).check_valid("infer", 5)  # type: ignore[arg-type]


def test_a_plan_is_copied_when_it_is_given() -> None:
    mine = plan([range(2)], [range(2)])
    config = RoundPipeRunConfig(execute_plan=mine)
    mine.fwd_plan.append(range(2, 3))
    assert config.execute_plan == plan([range(2)], [range(2)])


def chain(layers: int = 8) -> RoundPipe:
    return RoundPipe(nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)]))


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_the_longest_layer_alone_says_how_long_a_stage_is(run_type: RunType) -> None:
    """As published, whatever `min_stages` is. Costs are estimates here, and so alike."""
    model = chain()
    costs = model.costs()
    ahead = [cost.forward_ms for cost in costs]
    behind = [cost.forward_ms + cost.backward_ms for cost in costs]
    longest = max(ahead if run_type == "infer" else behind)
    for options in ({"min_stages": 1}, {"min_stages": 3}, {"min_stages": 1, "upper_threshold": 2.0}):
        cut = ModelExecutePlan.auto(run_type, model, **options)  # type: ignore[arg-type]
        cut.check_valid(8, run_type)
        most = options.get("upper_threshold", 1.1) * longest * 1.001
        assert all(sum(ahead[layer] for layer in stage) <= most for stage in cut.fwd_plan), options
        assert all(sum(behind[layer] for layer in stage) <= most for stage in cut.bwd_plan), options


def test_without_a_rule_the_planner_searches() -> None:
    model = chain()
    assert ModelExecutePlan.auto("fused", model) == model._searched_plan("fused")
    assert ModelExecutePlan.auto("train") == []


def test_stages_keep_to_the_memory_that_is_given() -> None:
    of_layer = 64 * 65 * 4 / 1e9
    cut = ModelExecutePlan.auto("infer", chain(), upper_threshold=8.0, model_memory_limit=2.5 * of_layer)
    assert max(map(len, cut.fwd_plan)) <= 2


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ((nn.Linear(1, 1),), {}, "model 0 is a Linear, expected a RoundPipe"),
        ((chain(),), {"min_stages": 0}, "min_stages is 0"),
        ((chain(),), {"upper_threshold": 0.9}, "upper_threshold is 0.9"),
        ((chain(),), {"model_memory_limit": 0}, "model_memory_limit is 0"),
    ],
)
def test_auto_refuses(models: tuple[nn.Module, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelExecutePlan.auto("train", *models, **{"min_stages": 1, **options})
