"""`roundpipe plan --nodes`: against times by hand, with what limits them, and with mistakes named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app
from roundpipe.plan.machine import Machine, load

LAYERS, HEAD_MS = 6, 60.0
WEIGHTS = 100_000_000  # bytes of a layer
AT_ONCE = "--gradients-at-once"
# 8 microbatches on two devices; the head recomputes nothing.
WORK_MS = 8 * (LAYERS * (2 * 10 + 20) + HEAD_MS) / 2


@pytest.fixture
def costs(tmp_path: Path) -> str:
    return written(tmp_path / "costs.json")


def written(path: Path, **changes: Any) -> str:
    layer = {"count": LAYERS, "forward_ms": 10, "backward_ms": 20, "weight_bytes": WEIGHTS, "activation_bytes": 1000}
    document = {
        "schema": "roundpipe-costs",
        "version": 1,
        "name": "mine",
        "layers": [layer | changes.pop("layer", {})],
        "head": {"forward_ms": 20, "backward_ms": 40, "weight_bytes": 0},
        "tokens": 1000,
        "link_up_gb_per_s": 100,
        "link_down_gb_per_s": 100,
    }
    path.write_text(json.dumps(document | changes))
    return str(path)


def run(*arguments: str) -> str:
    small = ("--devices", "2", "--microbatches", "8", "--search-seconds", "0.001")
    result = CliRunner().invoke(app, ["plan", *arguments, *small], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def nodes_of(*arguments: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(run(*arguments, "--json"))["nodes"]
    return entries


def test_a_fast_network_leaves_the_step_of_one_node(costs: str) -> None:
    entries = nodes_of(costs, "--nodes", "1,2,8", "--network", "100Gb/s", "--network-latency", "0")
    assert [entry["nodes"] for entry in entries] == [1, 2, 8]
    for entry in entries:
        assert entry["step_ms"] == pytest.approx(WORK_MS, rel=0.01)
        assert entry["efficiency_percent"] == pytest.approx(100, abs=0.5)
        assert entry["limited_by"] == "compute" and entry["exposed_ms"] < 0.01 * WORK_MS
        # Gradients and weights, each less the node's own part, at 12.5 GB/s.
        moved = 2 * LAYERS * WEIGHTS * (entry["nodes"] - 1) / entry["nodes"]
        assert entry["network_busy_ms"] == pytest.approx(moved / 12.5e6)
        rows = entry["nodes"] * 8 / entry["step_ms"] * 1000
        assert entry["microbatches_per_s"] == pytest.approx(rows)
        assert entry["tokens_per_s"] == pytest.approx(1000 * rows)


def test_one_node_steps_as_without_nodes(costs: str) -> None:
    options = (costs, "--update-rate", "3", "--json")
    alone = json.loads(run(*options, "--links"))
    report = json.loads(run(*options, "--nodes", "1"))
    assert report["nodes"][0]["step_ms"] == report["step_ms"] == alone["step_ms"]


def test_what_limits_the_step_is_named(costs: str) -> None:
    quick = ("--network", "100Gb/s", "--network-latency", "0")

    def limits(*options: str) -> list[str]:
        return [entry["limited_by"] for entry in nodes_of(costs, "--nodes", "1,4", *options)]

    # Together 600 MB at 0.3 GB/s: 2 s. Four nodes update a quarter each.
    assert limits(*quick, "--update-rate", "0.3") == ["optimizer", "compute"]
    assert limits("--network", "100Gb/s", "--network-latency", "100")[1] == "network latency"
    assert limits("--network", "2Gb/s")[1] == "network"
    clipped = nodes_of(costs, "--mode", "sync", "--nodes", "1,4", *quick, "--clip", "--update-rate", "1")
    free = nodes_of(costs, "--mode", "sync", "--nodes", "1,4", *quick, "--update-rate", "1")
    assert clipped[0]["limited_by"] == "optimizer" and clipped[0]["step_ms"] > 1.02 * free[0]["step_ms"]
    # Without clipping, the last layers' updates hide behind the backward.
    assert clipped[0]["unlimited_ms"]["clipping"] == pytest.approx(free[0]["step_ms"])
    assert "clipping" not in free[0]["unlimited_ms"]


def test_the_network_of_a_machine_file(costs: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    machine = Machine("one", [(1.0, 0)] * 2, {"link_up_gb_per_s": 100.0}, 0.0, 0.125, 0.0)
    machine.save(path)
    assert load(path) == machine
    report = json.loads(run(costs, "--machine", str(path), "--nodes", "4", "--json"))
    assert (report["network_gb_per_s"], report["network_latency_ms"]) == (0.125, 0)
    by_file = report["nodes"][0]
    assert by_file["network_busy_ms"] == pytest.approx(2 * LAYERS * WEIGHTS * 0.75 / 125_000)
    # An option goes before the file.
    options = ("--network", "2.5Gb/s", "--network-latency", "2")
    report = json.loads(run(costs, "--machine", str(path), "--nodes", "4", *options, "--json"))
    assert (report["network_gb_per_s"], report["network_latency_ms"]) == (0.3125, 2)
    assert report["nodes"][0]["network_busy_ms"] == pytest.approx(by_file["network_busy_ms"] * 0.4)
    # A file without a network has no say, and the latency has a default.
    Machine("one", [(1.0, 0)] * 2, {"link_up_gb_per_s": 100.0}).save(path)
    with pytest.raises(ValueError, match=r"--network is not given, expected it with --nodes, or network_gb_per_s in"):
        run(costs, "--machine", str(path), "--nodes", "4")
    report = json.loads(run(costs, "--machine", str(path), "--nodes", "4", "--network", "8 Gbit/s", "--json"))
    assert (report["network_gb_per_s"], report["network_latency_ms"]) == (1, 1)
    for field, value in (("network_gb_per_s", "-1"), ("network_latency_ms", '"1 ms"')):
        path.write_text(
            f'schema = "roundpipe-machine"\nversion = 1\n{field} = {value}\n[[devices]]\ncount = 2\n', encoding="utf-8"
        )
        with pytest.raises(ValueError, match=rf"^\[machine\] {field} is "):
            load(path)


def test_weights_of_gradients_that_do_not_wait_come_later() -> None:
    options = ("llama3.1-8b", "--mode", "sync", "--nodes", "1,2", "--network", "1Gb/s")
    waiting, at_once = ([entry["step_ms"] for entry in nodes_of(*options, *more)] for more in ((), (AT_ONCE,)))
    assert waiting[0] == at_once[0] and waiting[1] < at_once[1]


def test_the_table_and_a_picture(costs: str, tmp_path: Path) -> None:
    page = tmp_path / "nodes.html"
    shown = run(costs, "--nodes", "1,2,64", "--network", "10Gb/s", "--picture", str(page), "--clip")
    assert "mine: 2 devices, 8 microbatches, async" in shown
    assert "network 10 Gb/s, latency 1 ms, clipping" in shown
    for column in ("step ms", "efficiency %", "network busy ms", "exposed ms", "tokens/s", "limited by"):
        assert column in shown
    rows = [line for line in shown.splitlines() if re.match(r"\W+(1|2|64) ", line)]
    assert len(rows) == 3 and "compute" in rows[0]
    text = page.read_text()
    assert text.count("<svg") == 3 and "64 nodes: " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes is 0, expected numbers from 1 to 4096 with commas"),
        (["--nodes", "2,x"], "--nodes is 2,x, expected numbers"),
        (["--nodes", "2,4,2", "--network", "1Gb/s"], "--nodes is 2,4,2, expected 2 only once"),
        (["--nodes", "5000"], "--nodes is 5000, expected numbers"),
        (["--nodes", ""], "--nodes is , expected numbers"),
        (["--nodes", "2"], "--network is not given, expected it with --nodes"),
        (["--nodes", "2", "--network", "10"], "--network is 10, expected bits or bytes per second"),
        (["--nodes", "2", "--network", "0Gb/s"], "--network is 0Gb/s, expected bits or bytes per second"),
        (["--nodes", "2", "--network", "10gb/s"], "--network is 10gb/s, expected bits or bytes per second"),
        (["--nodes", "2", "--network", "1Gb/s", "--network-latency", "-1"], "--network-latency is -1.0, expected 0 to"),
        (["--nodes", "2", "--network", "1Gb/s", "--network-latency", "nan"], "--network-latency is nan, expected 0"),
        (["--nodes", "2", "--network", "1Gb/s", "--compare", "all"], "--compare is all, expected it without --nodes"),
        (["--network", "1Gb/s"], "--network has no effect here, expected it only with --nodes"),
        (["--network-latency", "1"], "--network-latency has no effect here, expected it only with --nodes"),
        (
            ["--nodes", "2", "--network", "1Gb/s", "--mode", "sync", "--clip", AT_ONCE],
            "--clip is given, expected it without --gradients-at-once",
        ),
        (["--clip"], "--clip has no effect here, expected it only with --nodes"),
    ],
)
def test_mistakes_are_named(costs: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"^\[options\] " + re.escape(message)):
        run(costs, *options)


def test_costs_without_tokens(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    written(path)
    document = json.loads(path.read_text())
    del document["tokens"]
    path.write_text(json.dumps(document))
    assert nodes_of(str(path), "--nodes", "1")[0]["tokens_per_s"] is None
    assert "?" in run(str(path), "--nodes", "1")
    for wrong in (0, 1.5e12, "8192"):
        path.write_text(json.dumps(document | {"tokens": wrong}))
        with pytest.raises(ValueError, match=r"\[costs\] tokens is "):
            run(str(path), "--nodes", "1")
