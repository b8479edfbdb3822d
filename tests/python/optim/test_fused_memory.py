"""The bytes a parameter, fourteen or fewer, by the books and by what the process really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from process_memory import report_of
from sweeps import mostly_long

WIDTH, LAYERS = 2048, 10  # 42 M parameters


def run(formats: tuple[str, str], mode: str) -> dict[str, Any]:
    # What the virtual device has freed is not the host's memory to be measured.
    result: dict[str, Any] = report_of("fused_memory_program.py", *formats, mode, str(WIDTH), str(LAYERS))
    return result


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
    measured = run(formats, mode)
    count = WIDTH * WIDTH * LAYERS
    assert measured["parameters"] == count
    assert 0.99 * bytes_each * count <= measured["predicted"] <= bytes_each * count * 1.001
    assert "B/parameter" in measured["table"]
    taken = measured["peak"] - measured["base"] - measured["devices"]
    assert taken <= measured["predicted"] * 1.03 + 125e6, measured
    # The books leave nothing out, and claim nothing that is not there.
    assert taken >= measured["predicted"] * 0.9, measured


@pytest.mark.long
def test_loading_a_state_needs_no_second_one(tmp_path: Path) -> None:
    measured = report_of("state_loading_program.py", str(WIDTH), str(LAYERS), tmp_path / "state.pt")
    # One parameter's at a time, of the ten.
    assert measured["grown"] < 0.2 * measured["state"], measured
