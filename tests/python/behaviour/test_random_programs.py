"""Random programs: the plain loop's bits, or one clear error, and the end they ask for; never a hang or a signal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import random_program
from programs import ProgramRunner
from random_program import EXIT_STATUS

PROGRAM = Path(random_program.__file__)
STATEMENTS = (
    *("draw", "fill", "submit", "submit", "loss", "forget", "forward_backward", "forward_backward", "forward"),
    *("loss_outside", "step", "step_asynchronously", "step_asynchronously", "step_clipped", "synchronize", "evaluate"),
    *("train", "change", "collect", "wrong_label", "fail_in_forward", "fail_in_backward", "fail_in_recompute"),
    *("fail_in_loss", "fork"),
)
# How a program ends, its status, and whether it says that all was equal.
ENDINGS = {
    "end": (0, True),
    "exit_in_thread": (0, True),
    "leave": (0, False),
    "exit": (EXIT_STATUS, False),
    "end_hard": (EXIT_STATUS, False),
    "raise_": (1, False),
}

TOGETHER = 10  # programs in one process, which takes longer to end than they do

programs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {
                "devices": st.sampled_from([1, 2, 4]),
                "layers": st.integers(1, 4),
                "microbatches": st.integers(1, 3),
            }
        ),
        "statements": st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=12),
    }
)
processes = st.fixed_dictionaries(
    {
        "programs": st.lists(programs, min_size=TOGETHER, max_size=TOGETHER),
        "ending": st.sampled_from(list(ENDINGS)),
    }
)


def check(runner: ProgramRunner, process: dict[str, Any]) -> None:
    ending = process["ending"]
    done = runner.run(PROGRAM, json.dumps(process))
    status, says_equal = ENDINGS[ending]
    assert done.returncode == status, f"{process}\n{done.stderr}"
    assert done.stdout.count("equal") == TOGETHER - 1 + says_equal, f"{process}\n{done.stderr}"
    assert ending == "raise_" or "Error" not in done.stderr, f"{process}\n{done.stderr}"


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(process=processes)
def test_some_random_programs(runner: ProgramRunner, process: dict[str, Any]) -> None:
    check(runner, process)


@pytest.mark.long
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(process=processes)
def test_a_thousand_random_programs(runner: ProgramRunner, process: dict[str, Any]) -> None:
    check(runner, process)
