"""What the pictures of `roundpipe plan` show: steps at the pace that is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def bars(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def idle_percent(events: list[dict[str, Any]], length_ms: float, devices: int) -> float:
    busy_ms = sum(event["dur"] for event in events if event["name"] not in ("upload", "download")) / 1000
    return 100 * (1 - busy_ms / (devices * length_ms))


def test_an_asynchronous_picture_shows_the_printed_bubble(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--microbatches", "16", "--search-seconds", "0.001", "--picture", str(path), "--json")
    entry = json.loads(run("plan", "qwen3-1.7b", *options))
    events = bars(path)
    length_ms = 2 * entry["step_ms"]
    # A pipeline that was still empty would leave the first bars of the last devices out.
    for device in range(8):
        assert min(event["ts"] for event in events if event["tid"] == device) < 0.2e6 * entry["step_ms"] / 1000
    assert min(event["ts"] for event in events) >= 0
    assert max(event["ts"] + event["dur"] for event in events) <= 1000 * length_ms + 1
    assert idle_percent(events, length_ms, 8) == pytest.approx(entry["bubble_percent"], abs=1)


@pytest.mark.long
def test_the_picture_over_links_is_cut_like_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--links", "--search-seconds", "0.001", "--picture", str(path), "--json")
    entry = json.loads(run("plan", "qwen3-1.7b", *options))
    events = bars(path)
    assert {"upload", "download"} < {event["name"] for event in events}
    assert max(event["ts"] + event["dur"] for event in events) <= 2000 * entry["step_ms"] + 1


def test_a_synchronous_picture_shows_the_whole_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--mode", "sync", "--search-seconds", "0.001", "--picture", str(path), "--json")
    entry = json.loads(run("plan", "qwen3-1.7b", *options))
    events = bars(path)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1000 * entry["step_ms"])
    assert idle_percent(events, entry["step_ms"], 8) == pytest.approx(entry["bubble_percent"], abs=0.01)


def test_the_notation_of_stages_has_a_legend() -> None:
    legend = "5x3*2 = 5 stages of 3 layers"
    lines = run("plan", "qwen3-1.7b", "--search-seconds", "0").splitlines()
    assert sum(legend in line for line in lines) == 1


def test_no_percentage_is_minus_zero(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    for layers in (1, 2, 3, 5, 8, 13):
        entry = {"count": layers, "forward_ms": 0.1, "backward_ms": 0.3}
        costs.write_text(json.dumps({"schema": "roundpipe-costs", "version": 1, "layers": [entry]}))
        for mode in ("async", "sync"):
            assert "-0.00" not in run("plan", str(costs), "--mode", mode, "--search-seconds", "0", "--devices", "3")
