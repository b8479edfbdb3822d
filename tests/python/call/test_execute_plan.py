from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from roundpipe.call.execute_plan import ModelExecutePlan, RunType
from roundpipe.call.run_config import RoundPipeRunConfig


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


class Planned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []

    def _auto_plan(self, *args: Any) -> ModelExecutePlan:
        self.asked.append(args)
        return plan([range(len(self.asked))])


def test_auto_asks_the_model() -> None:
    a, b = Planned(), Planned()
    assert ModelExecutePlan.auto("infer", a, min_stages=3) == plan([range(1)])
    assert a.asked == [("infer", 3, 1.1, None)]
    assert ModelExecutePlan.auto("train") == []
    ModelExecutePlan.auto("train", b, min_stages=2, upper_threshold=1.5, model_memory_limit=8)
    assert b.asked == [("train", 2, 1.5, 8)]


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ((nn.Linear(1, 1),), {}, "model 0 is a Linear, expected a RoundPipe"),
        ((Planned(),), {"min_stages": 0}, "min_stages is 0"),
        ((Planned(),), {"upper_threshold": 0.9}, "upper_threshold is 0.9"),
        ((Planned(),), {"model_memory_limit": 0}, "model_memory_limit is 0"),
    ],
)
def test_auto_refuses(models: tuple[nn.Module, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelExecutePlan.auto("train", *models, **{"min_stages": 1, **options})
