"""docs/reference/models.md is what tools/models_table.py makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


@pytest.mark.long
def test_the_page_of_models_is_current(one_torch_thread: None) -> None:
    tool = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "models_table.py"))
    assert tool["FILE"].read_text() == tool["text"](), "run python tools/models_table.py"
