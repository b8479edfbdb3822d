"""The bytes a parameter, fourteen or fewer, by the books and by what the process really takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from process_memory import report_of
from sweeps import mostly_long

WIDTH, LAYERS = 2048, 10  # 42 M parameters
COUNT = WIDTH * WIDTH * LAYERS
LAYER = WIDTH * WIDTH  # parameters


def run(mode: str, **formats: str) -> dict[str, Any]:
    # What the virtual device has freed is not the host's memory to be measured.
    measured: dict[str, Any] = report_of("fused_memory_program.py", json.dumps(formats), mode, str(WIDTH), str(LAYERS))
    assert measured["parameters"] == COUNT
    assert "B/parameter" in measured["table"]
    taken = measured["peak"] - measured["base"] - measured["devices"]
    assert taken <= measured["predicted"] * 1.03 + 125e6, measured
    # The books leave nothing out, and claim nothing that is not there.
    assert taken >= measured["predicted"] * 0.9, measured
    return measured


# Of a parameter, by the formats of moments and masters.
BYTES_EACH = {
    ("float32", "float32"): 14.0,
    ("8bit", "float32"): 8.05,
    ("float32", "24bit"): 13.0,
    ("8bit", "24bit"): 7.05,
}


@pytest.mark.parametrize("mode", mostly_long(["async", "sync"], "async"))
@pytest.mark.parametrize("formats", mostly_long(BYTES_EACH, ("8bit", "float32"), ("8bit", "24bit")))
def test_bytes_a_parameter(formats: tuple[str, str], mode: str) -> None:
    bytes_each = BYTES_EACH[formats]
    measured = run(mode, moments=formats[0], masters=formats[1])
    assert 0.99 * bytes_each * COUNT <= measured["predicted"] <= bytes_each * COUNT * 1.001


@pytest.mark.parametrize("formats", mostly_long(BYTES_EACH, ("float32", "float32"), ("8bit", "24bit")))
def test_gradients_at_once_have_room_for_three_layers(formats: tuple[str, str]) -> None:
    measured = run("sync", moments=formats[0], masters=formats[1], gradients="at_once")
    others = (BYTES_EACH[formats] - 2) * COUNT
    # Where updates are faster than the device, fewer layers' gradients are there at the same time.
    assert 0.99 * others + 2 * LAYER <= measured["predicted"] <= (others + 3 * 2 * LAYER) * 1.001


# Bytes of a parameter: everywhere, and of three layers.
ON_DISK = {"moments": (6, 8), "masters": (4, 10)}


@pytest.mark.parametrize("holds", mostly_long(ON_DISK, "masters"))
def test_what_is_on_a_disk_takes_no_memory(holds: str, tmp_path: Path) -> None:
    everywhere, of_three = ON_DISK[holds]
    measured = run("async", disk=str(tmp_path), disk_holds=holds)
    assert measured["predicted"] == pytest.approx(everywhere * COUNT + 3 * of_three * LAYER, rel=0.01)
    assert "on the disk" in measured["table"]
    assert list(tmp_path.iterdir()) == []


def test_least_of_all(tmp_path: Path) -> None:
    measured = run("sync", disk=str(tmp_path), disk_holds="masters", masters="24bit", gradients="at_once")
    # Weights; moments and masters of three layers, and gradients of one to three.
    least = 2 * COUNT + 3 * (8 + 1) * LAYER + 2 * LAYER
    assert 0.99 * least <= measured["predicted"] <= 1.01 * (least + 2 * 2 * LAYER)


@pytest.mark.long
def test_loading_a_state_needs_no_second_one(tmp_path: Path) -> None:
    measured = report_of("state_loading_program.py", str(WIDTH), str(LAYERS), tmp_path / "state.pt")
    # One parameter's at a time, of the ten.
    assert measured["grown"] < 0.2 * measured["state"], measured
