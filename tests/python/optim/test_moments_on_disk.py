"""Moments and masters on a disk: the same bits, less memory, and nothing lost when it fails or a process is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disk_program
import roundpipe
from disk_program import Training
from robustness import script_environment
from roundpipe import RoundPipe
from roundpipe.model.step.fused_optimizer import DiskHolds
from sweeps import mostly_long

PROGRAM = Path(disk_program.__file__)


def lines_of(disk: str, holds: str, run: Path, *arguments: str) -> dict[str, str]:
    command = [sys.executable, str(PROGRAM), disk, holds, str(run), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=script_environment(), check=False)
    assert process.returncode == 0, process.stderr
    return dict(line.split(" ", 1) for line in process.stdout.splitlines())


KINDS = {
    "moments": {"holds": "moments"},
    "masters": {"holds": "masters"},
    "24-bit masters": {"holds": "masters", "masters": "24bit"},
    "masters of fp16": {"holds": "masters", "dtype": torch.float16},
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_states_are_those_in_memory(kind: str, is_async: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = KINDS[kind]
    plain, disk = Training(None, **options), Training(str(tmp_path), **options)
    for training in (plain, disk):
        for _ in range(4):
            training.step(is_async)
    assert plain.checksum() == disk.checksum()
    stats = disk.optimizer.binding.disk_stats()
    assert stats is not None and stats.read_bytes > 0 and stats.written_bytes > 0
    assert plain.optimizer.binding.disk_stats() is None
    memory, of_plain = disk.optimizer.host_memory(), plain.optimizer.host_memory()
    assert memory.moments + memory.moments_on_disk == of_plain.moments
    assert memory.masters + memory.masters_on_disk == of_plain.masters
    has_masters = kind != "moments"
    assert (memory.masters_on_disk > 0) == has_masters
    assert 0 < memory.moments + (memory.masters if has_masters else 0) <= 24576 and memory.total < of_plain.total
    own, other = disk.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert own.keys() == other.keys()
    for index, state in own.items():
        assert state.keys() == other[index].keys()
        assert all(torch.equal(state[name], other[index][name]) for name in state)
    # And a state goes back, over one that is there.
    disk.step(is_async)
    disk.optimizer.load_state_dict(plain.optimizer.state_dict())
    again = disk.optimizer.state_dict()["state"]
    for name in other[0]:
        assert torch.equal(again[0][name], other[0][name]), name


def test_masters_follow_the_model_to_another_optimizer(tmp_path: Path) -> None:
    plain, disk = Training(None), Training(str(tmp_path), "masters")
    for training in (plain, disk):
        training.step(is_async=True)
    for places in ({"disk": tmp_path, "disk_memory": 24576, "disk_holds": "masters"}, {}):
        replaced = [training.optimizer for training in (plain, disk)]
        plain.optimizer = roundpipe.optim.AdamW(plain.model, lr=1e-2, masters="24bit")
        disk.optimizer = roundpipe.optim.AdamW(disk.model, lr=1e-2, masters="24bit", **places)
        # What a replaced optimizer says of masters is what the model has.
        masters = [optimizer.state_dict()["state"][0]["master_remainder"] for optimizer in replaced]
        assert masters[0].dtype == torch.int8 and torch.equal(*masters)
        for training in (plain, disk):
            training.step(is_async=True)
        assert plain.checksum() == disk.checksum()


HOLDS = mostly_long(["moments", "masters"], "masters")


@pytest.mark.timeout(3600)  # a life takes some seconds
@pytest.mark.parametrize("kills", mostly_long([4, 200], 4))
@pytest.mark.parametrize("holds", HOLDS)
def test_killed_runs_leave_nothing_and_go_on_with_the_same_bits(holds: str, kills: int, tmp_path: Path) -> None:
    lines = lines_of(str(tmp_path / "disk"), holds, tmp_path / "run", "lives", str(kills))
    assert int(lines["reached"]) >= kills
    expected = lines_of("", holds, tmp_path / "whole", "train", lines["step"])
    assert lines["weights"] == expected["weights"]
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("holds", HOLDS)
def test_a_disk_that_refuses_writes_is_told_and_loses_nothing(holds: str, tmp_path: Path) -> None:
    lines = lines_of(str(tmp_path / "disk"), holds, tmp_path / "run", "full")
    assert lines["told"].startswith("[disk] cannot write ") and "File too large" in lines["told"]
    assert f"of the scratch file in {tmp_path / 'disk'}" in lines["told"]
    expected = Training(None)
    for _ in range(4):
        expected.step(is_async=False)
    assert lines["weights"] == expected.checksum()
    resumed = Training(None)
    resumed.resume(tmp_path / "run")
    assert resumed.steps == 3
    resumed.step(is_async=False)
    assert lines["weights"] == resumed.checksum()


@pytest.mark.parametrize("devices", mostly_long(["virtual:1", "virtual:4"], "virtual:4"))
@pytest.mark.parametrize("holds", HOLDS)
def test_checkpoints_are_the_same_files(holds: DiskHolds, devices: str, tmp_path: Path) -> None:
    contents = []
    for place in (None, str(tmp_path / "disk")):
        training = Training(place, holds, devices)
        for _ in range(2):
            training.step(is_async=True)
        run = tmp_path / f"run {place is None}"
        roundpipe.save_checkpoint(run, training.model, training.optimizer, wait=True)
        contents.append({file.name: file.read_bytes() for file in (run / "step-2").iterdir()})
    assert contents[0].keys() == contents[1].keys()
    for name, content in contents[0].items():
        if name.endswith(".safetensors"):
            assert content == contents[1][name], name


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    plain = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"disk are for a RoundPipe model"):
        roundpipe.optim.AdamW(plain.parameters(), disk=str(tmp_path))
    roundpipe.devices("virtual:1")
    model = RoundPipe(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), name="refused")
    with pytest.raises(ValueError, match=r"\[optim\] disk is '', expected a folder"):
        roundpipe.optim.AdamW(model, disk="")
    with pytest.raises(ValueError, match=r"\[disk\] disk_memory is given without disk"):
        roundpipe.optim.AdamW(model, disk_memory="1GB")
    with pytest.raises(ValueError, match=r"\[disk\] disk_holds is 'masters' without disk"):
        roundpipe.optim.AdamW(model, disk_holds="masters")
    with pytest.raises(ValueError, match=r"\[disk\] disk_holds is 'all', expected 'moments' or 'masters'"):
        roundpipe.optim.AdamW(model, disk=str(tmp_path), disk_holds="all")
    with pytest.raises(ValueError, match=r"\[disk\] the moments may take 100 B of host memory, expected at least"):
        roundpipe.optim.AdamW(model, disk=str(tmp_path), disk_memory=100)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"\[disk\] cannot make"):
        roundpipe.optim.AdamW(model, disk=str(tmp_path / "file" / "folder"), disk_memory=40_000)
    assert roundpipe.optim.AdamW(model).host_memory().moments_on_disk == 0
