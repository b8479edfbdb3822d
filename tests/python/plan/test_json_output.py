"""The JSON that `roundpipe plan` prints, against the schema in docs/reference/plan-files.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import roundpipe
from roundpipe.cli import app
from roundpipe.plan.options import PlanOptions

DOCS = Path(roundpipe.__file__).resolve().parents[2] / "docs" / "reference" / "plan-files.md"
SMALL = ("--devices", "2", "--microbatches", "4", "--search-seconds", "0")


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
    result = CliRunner().invoke(app, ["plan", *arguments, *SMALL, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def test_schema_and_inputs(costs: str, tmp_path: Path) -> None:
    report = run(costs, "--max-traffic", "3", "--save", str(tmp_path / "stages.json"))
    assert list(report)[:2] == ["schema", "inputs"]
    assert report["schema"] == "roundpipe.plan/2"
    names = {field.name for field in dataclasses.fields(PlanOptions)}
    assert set(report["inputs"]) == names - {"as_json"}
    assert report["inputs"]["max_traffic"] == 3 and report["inputs"]["search_seconds"] == 0
    assert report["inputs"]["memory"] is None and report["inputs"]["model"] == costs
    assert report["inputs"]["save"] == str(tmp_path / "stages.json") and report["inputs"]["picture"] is None
    assert (report["costs"], report["devices"], report["microbatches"], report["mode"]) == ("mine", 2, 4, "async")


def test_every_field_is_documented(costs: str) -> None:
    documented = DOCS.read_text()
    reports = [run(costs, "--links", "--compare", "all"), run(costs, "--nodes", "2", "--network", "10Gb/s")]
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
    linked, hops = run(costs, "--links", "--compare", "all"), run(costs, "--compare", "published")
    assert linked["step_ms"] > 1.2 * hops["step_ms"]  # slow links
    for report in (linked, hops):
        ours = report["schedules"][0]
        for field in ("step_ms", "bubble_percent"):
            assert report[field] == pytest.approx(ours[field]) and ours["plan"][field] == ours[field]
    assert linked["limit"] != "compute"
    # Ranked over fewer steps.
    assert linked["next_best"]["step_ms"] >= 0.95 * linked["step_ms"]
