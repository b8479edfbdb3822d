"""python/roundpipe/_core.pyi is what tools/core_stub.py makes of the extension."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from roundpipe import _core

ROOT = Path(__file__).resolve().parents[3]


def test_the_types_are_those_of_the_extension() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "core_stub.py"))
    assert tool["same"](tool["STUB"].read_text(), tool["generated"]()), "run python tools/core_stub.py"


def test_a_value_shows_its_attributes_and_keeps_them() -> None:
    value = _core.LayerBytes(weights=1, gradients=2, sums=3, rounded=4)
    assert repr(value) == "LayerBytes(weights=1, gradients=2, sums=3, rounded=4)"
    with pytest.raises(AttributeError):
        value.weights = 5
