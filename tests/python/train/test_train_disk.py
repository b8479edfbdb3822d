"""`roundpipe train --disk`: the run is the same, and what is predicted says what the disk has to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundpipe.plan.machine import Machine
from roundpipe.train.config import TrainConfig
from roundpipe.train.dry_run import dry_run
from roundpipe.train.session import run
from tiny_chat import chat_file, model_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def usual(tmp_path: Path) -> dict[str, Any]:
    model_folder(tmp_path / "model", num_hidden_layers=3)
    chat_file(tmp_path / "chat.jsonl", 60)
    return {
        "model": str(tmp_path / "model"),
        "data": [str(tmp_path / "chat.jsonl")],
        "length": 64,
        "steps": 3,
        "devices": "virtual:2",
        "samples": 0,
    }


def test_a_run_has_the_bits_of_one_in_memory(usual: dict[str, Any], tmp_path: Path) -> None:
    contents = []
    for disk in ({}, {"disk": str(tmp_path / "disk"), "disk_memory": "600KB", "disk_holds": "masters"}):
        out = tmp_path / f"run {len(contents)}"
        assert run(TrainConfig(**usual, **disk, dtype="bfloat16", out=str(out)), resume=False) == 0
        contents.append((out / "model" / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_dry_run_says_what_the_disk_does(usual: dict[str, Any], tmp_path: Path) -> None:
    steps = []
    for disk_gb_per_s in (0.0, 0.001):
        rates = {"link_up_gb_per_s": 1.0, "link_down_gb_per_s": 1.0, "host_gb_per_s": 0.0}
        speed = {"disk_both_gb_per_s": disk_gb_per_s} if disk_gb_per_s else {}
        Machine("test", [(1.0, 0)] * 2, rates, 1.0, disk=speed).save(tmp_path / "machine.toml")
        lines: list[str] = []
        disk = {"disk": str(tmp_path / "disk"), "disk_memory": "600KB", "disk_holds": "masters"}
        config = TrainConfig(**usual, **disk, out=str(tmp_path / "run"))
        dry_run(config, False, lines.append, tmp_path / "machine.toml")
        by_name = {line.split()[0]: line for line in lines if line.split()}
        assert "read and written in each step" in by_name["masters"]
        assert ("is not predicted" in by_name["masters"]) == (not disk_gb_per_s)
        steps.append(float(by_name["step"].split()[1].replace(",", "")))
    assert steps[1] > 2 * steps[0]


def test_options_that_do_not_belong_together(usual: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--disk-memory is 1GB, expected it only with --disk"):
        TrainConfig(**usual, out=str(tmp_path / "run"), disk_memory="1GB")
    with pytest.raises(ValueError, match=r"--disk-holds is masters, expected it only with --disk"):
        TrainConfig(**usual, out=str(tmp_path / "run"), disk_holds="masters")
