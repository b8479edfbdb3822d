"""A training under torchrun goes on by itself after a rank was killed, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import roundpipe
from robustness import script_environment

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "several_machines.py"

pytestmark = pytest.mark.long


def run(folder: Path, *options: object) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(PROGRAM), "--folder", str(folder), *map(str, options)]
    environment = {**script_environment(), "ROUNDPIPE_DEVICES": "virtual:1,threads=1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torch may find addresses of the life before
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def weights(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found is not None, output
    return found[1]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    expected = run(tmp_path / "undisturbed")
    steps = [int(step) for step in re.findall(r"step (\d+) ", expected)]
    assert steps == list(range(1, 13))
    disturbed = run(tmp_path / "disturbed", "--fail-rank", 1, "--fail-at", 7)
    steps = [int(step) for step in re.findall(r"step (\d+) ", disturbed)]
    assert set(steps) == set(range(1, 13))
    assert len(steps) > 12  # some were made again, from a checkpoint
    assert steps.count(1) == 1
    assert weights(disturbed) == weights(expected)
    assert roundpipe.latest(tmp_path / "disturbed") == tmp_path / "disturbed" / "step-12"
