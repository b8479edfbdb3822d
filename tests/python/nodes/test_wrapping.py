"""Which nodes train a model together, and what they have when it is wrapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from node_processes import NodeProcesses
from reference_loops import assert_same
from robustness import script_environment

PROGRAM = """
import os
import torch
import roundpipe

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
pipe = roundpipe.RoundPipe(model)
optimizer = roundpipe.optim.AdamW(pipe, lr=0.1)
for _ in range(3):
    pipe.forward_backward((torch.randn(4, 8),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.step(optimizer)
pipe.synchronize()
weights = sum(float(p.detach().double().sum()) for p in model.parameters())
os.write(1, f"weights {weights.hex()}\\n".encode())  # at once, as both ranks write
"""


def test_a_group_of_some_ranks(nodes: NodeProcesses) -> None:
    assert nodes.results(3, "members_of_a_group") == [(0, 2), None, (1, 2)]


def test_groups_that_overlap(nodes: NodeProcesses) -> None:
    assert nodes.results(3, "members_of_overlapping_groups") == [[(0, 2)], [(1, 2), (0, 2)], [(1, 2)]]


def test_groups_are_used_again_by_later_models(nodes: NodeProcesses, tmp_path: Path) -> None:
    for first, second, third in nodes.results(2, "connections_after_trainings", str(tmp_path)):
        assert first == second == third


def test_a_model_whose_root_runs_on_the_host(nodes: NodeProcesses) -> None:
    first, second = nodes.results(2, "wrapped_part_by_part")
    for name, value in first.items():
        assert_same(second[name], value, name)


@pytest.mark.long
def test_adapters_that_are_added_after_wrapping(nodes: NodeProcesses) -> None:
    first, second = nodes.results(2, "adapters_added_late", ["q_proj"])
    assert first
    for name, value in first.items():
        assert_same(second[name], value, name)


@pytest.mark.long
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = script_environment() | {"ROUNDPIPE_DEVICES": "virtual:1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.startswith("weights")]
    assert len(said) == 2
    assert len(set(said)) == 1
