"""Fourteen bytes a parameter, by the books and by what the process really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from process_memory import report_of
from sweeps import mostly_long

WIDTH, LAYERS = 2048, 10  # 42 M parameters


def run(moments: str, mode: str) -> dict[str, Any]:
    # What the virtual device has freed is not the host's memory to be measured.
    result: dict[str, Any] = report_of("fused_memory_program.py", moments, mode, str(WIDTH), str(LAYERS))
    return result


BYTES_EACH = {"float32": 14.0, "8bit": 8.05}  # of a parameter, by the kind of moments


@pytest.mark.parametrize("mode", mostly_long(["async", "sync"], "async"))
@pytest.mark.parametrize("moments", mostly_long(BYTES_EACH, "8bit"))
def test_bytes_a_parameter(moments: str, mode: str) -> None:
    bytes_each = BYTES_EACH[moments]
    measured = run(moments, mode)
    count = WIDTH * WIDTH * LAYERS
    assert measured["parameters"] == count
    assert measured["predicted"] <= bytes_each * count * 1.001
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
