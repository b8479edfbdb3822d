"""What the meter says of devices whose caps are known."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import roundpipe
from roundpipe.cli import app
from roundpipe.plan.machine import load
from roundpipe.plan.measure import measure


@pytest.mark.long
def test_links_with_caps_and_a_cap_of_memory() -> None:
    said: list[str] = []
    machine = measure(
        roundpipe.devices("virtual:2,link=1GB/s,memory=200MB"), rounds=1, say=said.append, layer_bytes=8_000_000
    )
    assert [memory for _, memory in machine.devices] == [200_000_000] * 2
    assert max(speed for speed, _ in machine.devices) == 1.0
    # Nothing is faster than its cap; how much slower it is depends on the host.
    assert 0 < machine.rates["link_up_gb_per_s"] <= 1.05
    assert 0 < machine.rates["link_down_gb_per_s"] <= 1.05
    # Both links in both directions, or up beside updates that read and write 13 bytes for each byte of weights.
    assert 0 <= machine.rates["host_gb_per_s"] <= max(4.2, 2.1 + 13 * machine.update_gb_per_s)
    assert machine.update_gb_per_s > 0
    assert machine.card is not None and set(machine.card.product_tflops) == {"bf16", "fp16", "fp32"}
    assert min(*machine.card.product_tflops.values(), machine.card.memory_gb_per_s, machine.card.launch_us) > 0
    together = ["all links together", "optimizer", "optimizer and links together", "card"]
    assert said == ["device 0: link and speed", "device 1: link and speed", *together]


@pytest.mark.long
def test_a_cap_of_the_host_is_found() -> None:
    machine = measure(roundpipe.devices("virtual:2,link=2GB/s,host=0.5GB/s"), rounds=1, layer_bytes=8_000_000)
    # A busy machine stretches the moments between transfers, which the cap then makes up for.
    assert 0 < machine.rates["host_gb_per_s"] <= 0.65


def test_the_command_writes_a_file_and_plans_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.toml"
    quickly = functools.partial(measure, rounds=1, layer_bytes=8_000_000)
    monkeypatch.setattr("roundpipe.plan.measure.measure", quickly)
    roundpipe.devices("virtual:1,memory=100MB")
    options = ["plan", "qwen3-1.7b", "--measure", str(path), "--search-seconds", "0.001", "--json"]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert load(path).devices == [(1.0, 100_000_000)]
    # The plan is the one for that machine.
    assert json.loads(done.stdout)["memory"]["device_memory"] == 100_000_000
