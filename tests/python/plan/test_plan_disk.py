"""A disk for moments in `roundpipe plan`: what a step moves, how long that takes, and how long the disk lasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from roundpipe.cli import app
from roundpipe.plan.machine import Machine, load, measure_disk
from tiny_chat import model_folder

RATES = {"link_up_gb_per_s": 20.0, "link_down_gb_per_s": 20.0, "host_gb_per_s": 0.0}
DISK = {"disk_write_gb_per_s": 0.003, "disk_read_gb_per_s": 0.004, "disk_both_gb_per_s": 0.002}


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    model_folder(tmp_path / "model", dtype=torch.bfloat16)

    def run(*arguments: str, disk: dict[str, float] = DISK) -> Any:
        path = tmp_path / "machine.toml"
        Machine("test", [(1.0, 0)], RATES, 1.0, disk=disk).save(path)
        command = ["plan", str(tmp_path / "model"), "--machine", str(path), "--tokens", "64", "--mode", "sync"]
        result = CliRunner().invoke(app, [*command, "--search-seconds", "0.01", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


def test_a_machine_file_has_its_disk(tmp_path: Path) -> None:
    machine = Machine("test", [(1.0, 0)], RATES, 1.0, disk=DISK)
    machine.save(tmp_path / "machine.toml")
    assert load(tmp_path / "machine.toml") == machine
    found = measure_disk(str(tmp_path / "disk"), 0.02)
    assert found.keys() == DISK.keys() and min(found.values()) > 0
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_a_step_moves_and_how_long_it_takes(planned: Any) -> None:
    plain = planned("--json")
    disk = planned("--json", "--disk", "/nvme", "--disk-memory", "400KB", "--disk-endurance", "1TB")
    assert "disk" not in plain
    moments = [report["memory"]["predicted_host_bytes"]["moments"] for report in (plain, disk)]
    moved = disk["disk"]["predicted_step_bytes"]
    assert moments[0] == moments[1] + moved and 0 < moments[1] <= 400_000
    # The disk is what limits the step.
    assert disk["disk"]["predicted_busy_ms"] == pytest.approx(moved / 0.002e6)
    assert disk["step_ms"] > disk["disk"]["predicted_busy_ms"] > plain["step_ms"]
    days = 1e12 / moved * disk["step_ms"] / (24 * 3600 * 1000)
    assert disk["disk"]["predicted_days"] == pytest.approx(days)


def test_masters_on_it_are_moved_too(planned: Any) -> None:
    given = ("--json", "--disk", "/nvme", "--disk-memory", "400KB")
    reports = [planned("--json"), planned(*given), planned(*given, "--disk-holds", "masters")]
    plain, moments, both = (report["memory"]["predicted_host_bytes"] for report in reports)
    moved = [report["disk"]["predicted_step_bytes"] for report in reports[1:]]
    assert (
        moments["fp32_masters"] == plain["fp32_masters"] > 0 and 0 < both["fp32_masters"] + both["moments"] <= 400_000
    )
    assert both["fp32_masters"] + both["moments"] + moved[1] == plain["fp32_masters"] + plain["moments"]
    assert moved[1] > moved[0] and reports[2]["step_ms"] > reports[1]["step_ms"]


def test_the_line(planned: Any) -> None:
    said = planned("--disk", "/nvme", "--disk-endurance", "1TB")
    assert "disk (predicted): " in said and "days of training" in said


def test_what_is_refused(planned: Any) -> None:
    with pytest.raises(ValueError, match=r"--disk is /nvme, expected --measure, or disk_both_gb_per_s in --machine"):
        planned("--disk", "/nvme", disk={})
    with pytest.raises(ValueError, match=r"--disk-memory has no effect here, expected it only with --disk"):
        planned("--disk-memory", "1GB")
    with pytest.raises(ValueError, match=r"--disk-holds has no effect here, expected it only with --disk"):
        planned("--disk-holds", "masters")
    with pytest.raises(ValueError, match=r"--disk-holds is all, expected moments or masters"):
        planned("--disk", "/nvme", "--disk-holds", "all")
