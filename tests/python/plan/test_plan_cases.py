"""The planner against a brute force, on uneven models and slow links: the cases of bench/plan_cases.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "bench")]

from support import plan_family  # noqa: E402

CASES = plan_family.cases()
# `make test-all` runs the others.
SHORT = (18,)
# Plans within 0.1 % are equal to the planner.
TIE = 1.001


def marked(number: int, case: plan_family.Case) -> Any:
    return pytest.param(case, id=case.name, marks=() if number in SHORT else pytest.mark.long)


@pytest.mark.parametrize("case", [marked(number, case) for number, case in enumerate(CASES)])
def test_near_the_best_of_a_brute_force(case: plan_family.Case) -> None:
    result = plan_family.compare(case)
    assert result.ratio <= 1.02
    assert result.greedy_ms is None or result.chosen_ms <= TIE * result.greedy_ms
