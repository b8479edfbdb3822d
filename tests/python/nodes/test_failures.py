"""A node that ends or stops is named by an error on every other node, and none waits for ever."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from node_processes import TIMEOUT_S, Node, NodeProcesses, Request, silent_ranks
from node_programs import Training

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# Of the process group: how long the others wait for a node that has stopped. One that has ended is seen at once. They
# have this time to connect as well, with forty processes on two cores.
PATIENCE_S = {KILL: TIMEOUT_S, STOP: 20.0}


def errors_of_others(ended: list[Node], silent: int) -> list[Any]:
    assert ended[silent].status == -KILL
    others = [node for rank, node in enumerate(ended) if rank != silent]
    for node in others:
        assert node.status == 0, node.errors
    return [node.result for node in others]


@pytest.mark.long
@pytest.mark.parametrize("silent", [0, 2])
def test_in_an_exchange(nodes: NodeProcesses, silent: int) -> None:
    requests = [
        Request(3, "exchange_with_a_silent_rank", (silent, int(how)), patience) for how, patience in PATIENCE_S.items()
    ]
    for ended in nodes.end_together(requests):
        for first, second in errors_of_others(ended, silent):
            assert first == second
            assert first.startswith("[distributed] rank")
            assert silent in silent_ranks(first), first


# The silent rank, and the moment of a step.
SHORT = [(1, ("stepped", 1))]
FIRST, LATER = (
    [(silent, (moment, step)) for silent in (0, 2) for moment in ("call", "step", "stepped")] for step in (0, 2)
)


@pytest.mark.parametrize(
    ("how", "cases"),
    [
        pytest.param(KILL, SHORT, id="killed"),
        pytest.param(KILL, FIRST, id="killed in the first step", marks=pytest.mark.long),
        pytest.param(KILL, LATER, id="killed later", marks=pytest.mark.long),
        pytest.param(STOP, FIRST, id="stopped in the first step", marks=pytest.mark.long),
        pytest.param(STOP, SHORT + LATER, id="stopped later", marks=pytest.mark.long),
    ],
)
def test_in_a_training(nodes: NodeProcesses, how: signal.Signals, cases: list[tuple[int, tuple[str, int]]]) -> None:
    training = Training(3, steps=6, width=512, max_grad_norm=1.0)
    at_once = replace(training, layers=6, is_async=False, clip_by="last_norm", options=(("gradients", "at_once"),))
    made = [(each, *case) for case in cases for each in (training, at_once)]
    requests = [
        Request(3, "train_with_a_silent_rank", (each, silent, int(how), at), PATIENCE_S[how])
        for each, silent, at in made
    ]
    for (_, silent, at), ended in zip(made, nodes.end_together(requests), strict=True):
        for error in errors_of_others(ended, silent):
            assert error.startswith("["), (at, error)
            assert silent in silent_ranks(error), (at, error)
