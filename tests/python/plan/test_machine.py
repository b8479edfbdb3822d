"""Machine files: what is written is read back, plans use it, and mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app
from roundpipe.plan.costs import load as load_costs
from roundpipe.plan.machine import Machine, load

MACHINE = Machine(
    'two "cards"',
    [(1.0, 24_000_000_000), (1.0, 24_000_000_000), (0.5, 0)],
    {"link_up_gb_per_s": 24.5, "link_down_gb_per_s": 1e-3},
    3.25,
)
QUICK = ("--search-seconds", "0.01", "--json")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE.text())
    assert load(path) == MACHINE
    costs = MACHINE.costs(load_costs("qwen3-1.7b"))
    assert costs.devices == MACHINE.devices
    assert costs.rates == {"link_up_gb_per_s": 24.5, "link_down_gb_per_s": 1e-3, "host_gb_per_s": 0.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = 3", "no schema 'roundpipe-machine' of version 1"),
        ('schema = "roundpipe-machine"\nversion = true', "no schema"),
        ('schema = "roundpipe-machine"\nversion = 1', "no devices, expected at least one"),
        ("= 3", "is not TOML"),
        ("a = " + 2000 * "[", "is nested too deeply"),
        ("speed = 3", "unknown field 'speed'"),
        (MACHINE.text().replace("24.5", "-1"), "link_up_gb_per_s is -1"),
        (MACHINE.text().replace("0.5", "0"), "devices[1].speed is 0"),
        (MACHINE.text().replace("count = 2", "count = 2000"), "devices[0].count is 2000"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^\[machine\] ") as error:
        load(path)
    assert message in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[machine\] cannot read .*: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ValueError, match=r"^\[machine\] cannot read .*: Is a directory"):
        run("plan", "qwen3-1.7b", "--machine", str(tmp_path))


@pytest.mark.long
def test_plans_are_for_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(Machine("one", [(2.0, 24_000_000_000)] * 2, {"link_up_gb_per_s": 25.0}, 0.2).text())
    options = ("qwen3-1.7b", "--machine", str(path), "--microbatches", "16", *QUICK)
    slow = json.loads(run("plan", *options))
    assert slow["devices"] == 2
    assert slow["limit"] == "optimizer"
    fast = json.loads(run("plan", *options, "--update-rate", "100"))
    costs = load_costs("qwen3-1.7b").layers
    # Devices twice as fast as the cost file's; the head's values are kept.
    work = sum(2 * cost.forward_ms + cost.backward_ms for cost in costs) - costs[-1].forward_ms
    assert fast["step_ms"] == pytest.approx(16 * work / 4, rel=0.02)
    with pytest.raises(ValueError, match=r"--machine is .* expected it without --measure"):
        run("plan", "qwen3-1.7b", "--machine", str(path), "--measure", str(tmp_path / "new.toml"))
