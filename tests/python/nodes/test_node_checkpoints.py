"""Checkpoints of several nodes: complete or not there, and the same bits on any number of nodes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from node_checkpoint_programs import Kind
from node_processes import NodeProcesses
from roundpipe.checkpoints.runs.show import problems_of

KINDS = {
    "bf16": Kind(torch.bfloat16),
    "fp32, synchronous": Kind(is_async=False),
    "fp16 with a scaler": Kind(torch.float16, scaled=True),
    "bf16, 8-bit moments": Kind(torch.bfloat16, moments="8bit"),
    "NAdam, own buffers": Kind(optimizer="NAdam", counting=True),
    "SGD": Kind(torch.bfloat16, optimizer="SGD"),
    "bf16, 24-bit masters": Kind(torch.bfloat16, masters="24bit"),
    "bf16, on a disk": Kind(torch.bfloat16, on_disk=True),
}
SHORT = "bf16"
PROGRAMS = "node_checkpoint_programs"


def run(nodes: NodeProcesses, size: int, program: str, *arguments: Any) -> list[Any]:
    return nodes.results(size, f"{PROGRAMS}:{program}", *arguments)


def run_each(
    nodes: NodeProcesses, size: int, program: str, names: Sequence[str], folder: Path, *more: Any
) -> dict[str, list[Any]]:
    """What each node returned, for each kind, whose trainings the same nodes make one after the other."""
    each = [(KINDS[name], str(folder / name), *more) for name in names]
    return dict(zip(names, zip(*run(nodes, size, "each_of", program, each), strict=True), strict=True))


def joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole state of all nodes, after a check that they have the same of what is whole."""
    whole = states[0]["whole"]
    for rank, state in enumerate(states):
        assert_same(state["whole"], whole, f"rank {rank}")
    found = dict(whole)
    for key in {key for state in states for key in state["parts"]}:
        parts = sorted((state["parts"][key] for state in states if key in state["parts"]), key=lambda part: part[0])
        found[key] = torch.cat([tensor for _, tensor in parts])
    counters = {name: step for state in states for name, step in state["counters"].items()}
    return found | {f"{name}/step": torch.tensor(step) for name, step in counters.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str = "") -> None:
    assert ours.keys() == theirs.keys(), where
    for name, value in ours.items():
        assert torch.equal(value.nan_to_num(), theirs[name].nan_to_num()), f"{where}: {name}"


def assert_same_nodes(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], where: str = "") -> None:
    assert_same(joined(ours), joined(theirs), where)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine["own"], other["own"], f"{where}: rank {rank}")


def assert_own_values(loaded: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], where: str) -> None:
    """Fewer nodes than have saved have what those of their ranks had; of more, each draws numbers of its own."""
    found = [node["own"] for node in loaded]
    if len(loaded) < len(saved):
        assert [own["drawn"].tolist() for own in found] == [own["drawn"].tolist() for own in saved[: len(found)]], where
        assert [int(own["seed"]) for own in found] == [100 + rank for rank in range(len(found))], where
    else:
        assert len({tuple(own["drawn"].tolist()) for own in found}) == len(found), where
        assert len({int(own["seed"]) for own in found}) == len(found), where


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([SHORT], id=SHORT),
        pytest.param([name for name in KINDS if name != SHORT], id="other kinds", marks=pytest.mark.long),
    ],
)
def test_any_number_of_nodes_has_the_same_bits(names: list[str], nodes: NodeProcesses, tmp_path: Path) -> None:
    saved = run_each(nodes, 3, "train_and_save", names, tmp_path, 2, 2)
    at_save = {name: [state for state, _ in said] for name, said in saved.items()}
    resumed = run_each(nodes, 3, "load_and_train", names, tmp_path, 2)
    for name, said in saved.items():
        assert [problems for _, problems in problems_of(tmp_path / name, print)] == [[]], name
        assert_same_nodes(resumed[name], [end for _, end in said], name)
    for size in (1, 2, 4):
        for name, loaded in run_each(nodes, size, "load_and_train", names, tmp_path, 0, False).items():
            assert_same(joined(loaded), joined(at_save[name]), f"{name} on {size}")
            assert_own_values(loaded, [own["own"] for own in at_save[name]], name)
    one = tmp_path / "one"
    alone = {name: said[0][0] for name, said in run_each(nodes, 1, "train_and_save", names, one, 2, 1).items()}
    for name, loaded in run_each(nodes, 2, "load_and_train", names, one, 0, False).items():
        assert_same(joined(loaded), joined([alone[name]]), name)
        assert_same(loaded[0]["own"], alone[name]["own"], name)
        assert loaded[1]["own"]["drawn"].tolist() != alone[name]["own"]["drawn"].tolist(), name


def test_within_a_step(nodes: NodeProcesses, tmp_path: Path) -> None:
    kind = Kind(torch.bfloat16, counting=True)
    expected = run(nodes, 2, "save_within_a_step", kind, str(tmp_path))
    assert len({float(node["own"][key]) for node in expected for key in node["own"] if "total" in key}) == 2
    assert_same_nodes(run(nodes, 2, "go_on_within_a_step", kind, str(tmp_path)), expected)
    for size in (1, 3):
        for error in run(nodes, size, "error_of_load", kind, str(tmp_path)):
            assert error.startswith("ValueError [load_checkpoint] ")
            assert "has gradients that no step has consumed" in error


@pytest.mark.long
def test_gradients_keep_the_kind_of_their_loss(nodes: NodeProcesses, tmp_path: Path) -> None:
    expected = run(nodes, 2, "step_of_saved_gradients", str(tmp_path), False)
    loaded = run(nodes, 2, "step_of_saved_gradients", str(tmp_path), True)
    for ours, theirs in zip(loaded, expected, strict=True):
        assert_same(ours, theirs)


def test_values_of_each_rank(nodes: NodeProcesses, tmp_path: Path) -> None:
    run(nodes, 2, "train_and_save", Kind(), str(tmp_path), 1, 0)
    for error in run(nodes, 1, "error_of_load", Kind(), str(tmp_path)):
        assert error.startswith("ValueError [load_checkpoint] state 'rank' differs between the 2 ranks")


def test_all_ranks_go_back_to_the_same_checkpoint(nodes: NodeProcesses, tmp_path: Path) -> None:
    run(nodes, 2, "save_with_a_limit", Kind(), str(tmp_path), 5, False)
    assert roundpipe.latest(tmp_path) == tmp_path / "step-3"
    file = tmp_path / "step-3" / "rank-00001-optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run(nodes, 2, "step_of_load", Kind(), str(tmp_path)) == [2, 2]


@pytest.mark.parametrize("limited", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_full_disk_of_a_rank(limited: int, nodes: NodeProcesses, tmp_path: Path) -> None:
    for rank, (error, later) in enumerate(run(nodes, 2, "save_with_a_limit", Kind(), str(tmp_path), limited, False)):
        assert "File too large" in error, rank
        assert (f"(on rank {limited})" in error) == (rank != limited)
        assert later == ""
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-1", "step-3"]


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_while_it_saves(killed: int, nodes: NodeProcesses, tmp_path: Path) -> None:
    ended = nodes.end(3, f"{PROGRAMS}:save_with_a_limit", Kind(), str(tmp_path), killed, True)
    assert ended[killed].status == -signal.SIGXFSZ
    for rank, node in enumerate(ended):
        if rank != killed:
            assert node.status == 0, node.errors
            assert node.result[0].startswith("RoundPipeError ["), node.result
            assert f"rank {killed}" in node.result[0]
    assert roundpipe.latest(tmp_path) == tmp_path / "step-1"
    assert run(nodes, 3, "step_of_load", Kind(), str(tmp_path)) == [1, 1, 1]


def test_wrong_saves_are_told_on_every_rank(nodes: NodeProcesses, tmp_path: Path) -> None:
    words = {
        "_other_folders": "expected one folder that all ranks share",
        "_other_steps": "the ranks save as steps [5, 6]",
        "_other_options": "differ between rank 0 and rank 1",
        "_value_without_a_format": "state.of is a builtins.object",
        "_only_one_rank": "rank 0 saves model",
        "_step_that_is_there": "is there already",
    }
    for said in run(nodes, 2, "errors_of_saves", str(tmp_path)):
        assert said.keys() == words.keys()
        for name, expected in words.items():
            assert expected in said[name], said[name]
