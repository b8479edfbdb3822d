"""The JSON that the planning commands print, against the schema in docs/planner.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import roundpipe
from roundpipe.cli import app
from roundpipe.planning.emulate_command import EmulateOptions
from roundpipe.planning.plan_options import PlanOptions
from roundpipe.simulation.command import SimulateOptions

DOCS = Path(roundpipe.__file__).resolve().parents[2] / "docs" / "planner.md"
OPTIONS: dict[str, Any] = {"plan": PlanOptions, "simulate": SimulateOptions, "emulate": EmulateOptions}
SMALL = ("--devices", "2", "--microbatches", "4", "--effort", "1000")


@pytest.fixture
def costs(tmp_path: Path) -> str:
    layers = [
        {"count": 5, "forward_ms": 1, "backward_ms": 2, "weight_bytes": 40_000_000, "activation_bytes": 8_000_000}
    ]
    rates = {"link_up_gb_per_s": 4, "link_down_gb_per_s": 4, "host_gb_per_s": 16}
    document = {"schema": "roundpipe-costs", "version": 1, "name": "mine", "layers": layers, **rates}
    (tmp_path / "costs.json").write_text(json.dumps(document))
    return str(tmp_path / "costs.json")


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


@pytest.mark.parametrize("command", list(OPTIONS))
def test_schema_and_inputs(command: str, costs: str) -> None:
    more = ("--schedule", "roundpipe", "--steps", "1") if command == "emulate" else ()
    report = run(command, costs, *SMALL, "--max-traffic", "3", *more)
    assert list(report)[:2] == ["schema", "inputs"]
    assert report["schema"] == f"roundpipe.{command}/1"
    names = {field.name for field in dataclasses.fields(OPTIONS[command])}
    assert set(report["inputs"]) == names - {"as_json"}
    assert report["inputs"]["max_traffic"] == 3 and report["inputs"]["effort"] == 1000
    assert report["inputs"]["memory"] is None and costs in report["inputs"].values()
    assert (report["costs"], report["devices"], report["microbatches"], report["mode"]) == ("mine", 2, 4, "async")


def test_files_are_among_the_inputs(costs: str, tmp_path: Path) -> None:
    report = run("plan", costs, *SMALL, "--save", str(tmp_path / "stages.json"))
    assert report["inputs"]["save"] == str(tmp_path / "stages.json") and report["inputs"]["png"] is None


def test_every_field_is_documented(costs: str) -> None:
    documented = DOCS.read_text()
    reports = [run("plan", costs, *SMALL), run("simulate", costs, *SMALL, "--links")]
    reports.append(run("simulate", costs, *SMALL, "--nodes", "2", "--network", "10Gb/s"))
    reports.append(run("emulate", costs, *SMALL, "--schedule", "roundpipe", "--steps", "1"))
    for report in reports:
        assert f"`{report['schema']}`" in documented
        for names in [
            report,
            *report.get("schedules", []),
            *report.get("nodes", []),
            *(e["plan"] for e in report.get("schedules", []) if "plan" in e),
        ]:
            for name in names:
                assert f"`{name}`" in documented, name


def test_times_over_links_are_everywhere(costs: str) -> None:
    linked = run("simulate", costs, *SMALL, "--links", "--schedule", "roundpipe")["schedules"][0]
    hops = run("simulate", costs, *SMALL, "--schedule", "roundpipe")["schedules"][0]
    assert linked["step_ms"] > 1.2 * hops["step_ms"]  # slow links
    for entry in (linked, hops):
        for field in ("step_ms", "bubble_percent"):
            assert entry["plan"][field] == entry[field]
    assert linked["plan"]["limit"] != "compute"
    # Ranked over fewer steps.
    assert linked["plan"]["next_best"]["step_ms"] >= 0.95 * linked["step_ms"]
