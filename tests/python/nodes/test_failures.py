"""A node that ends or stops is named by an error on every other node, and none waits for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from node_processes import TIMEOUT_S, Node, NodeProcesses
from node_programs import Training
from robustness import script_environment

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# Of the process group: how long the others wait for a node that has stopped. One that has ended is seen at once.
PATIENCE_S = {KILL: TIMEOUT_S, STOP: 5.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[NodeProcesses]:
    with NodeProcesses(script_environment()) as processes:
        yield processes


def errors_of_others(ended: list[Node], silent: int) -> list[str]:
    assert ended[silent].status == -KILL
    others = [node for rank, node in enumerate(ended) if rank != silent]
    for node in others:
        assert node.status == 0, node.errors
    return [node.result for node in others]


@pytest.mark.parametrize("silent", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", [KILL, STOP], ids=str)
def test_in_an_exchange(nodes: NodeProcesses, silent: int, how: signal.Signals) -> None:
    ended = nodes.end(3, "exchange_with_a_silent_rank", silent, int(how), timeout_s=PATIENCE_S[how])
    for first, second in errors_of_others(ended, silent):
        assert first == second
        assert first.startswith(f"[distributed] rank {silent} did not answer rank ")


@pytest.mark.parametrize("how", [KILL, pytest.param(STOP, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(
    ("silent", "at"),
    [
        (1, ("stepped", 1)),
        *(
            pytest.param(silent, (moment, step), marks=pytest.mark.long)
            for silent in (0, 2)
            for moment in ("call", "step", "stepped")
            for step in (0, 2)
        ),
    ],
)
def test_in_a_training(nodes: NodeProcesses, silent: int, at: tuple[str, int], how: signal.Signals) -> None:
    training = Training(3, steps=6, width=512, max_grad_norm=1.0)
    ended = nodes.end(3, "train_with_a_silent_rank", training, silent, int(how), at, timeout_s=PATIENCE_S[how])
    for error in errors_of_others(ended, silent):
        assert error.startswith("[")
        assert f"rank {silent}" in error
