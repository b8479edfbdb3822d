"""docs/reference/models.md is what tools/models_table.py makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from multimodal_models import MODELS
from multimodal_others import OTHERS
from multimodal_trials import ALL
from sweeps import mostly_long

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "models_table.py"))


@pytest.mark.parametrize("name", mostly_long(ALL))
def test_a_models_rows_are_current(name: str, one_torch_thread: None) -> None:
    # Whether a convolution's last bits are others in a recomputation depends on the processor.
    lines = TOOL["FILE"].read_text().replace("bits'", "bits").splitlines()
    missing = [line for line in TOOL["rows"](name) if line.replace("bits'", "bits") not in lines]
    assert not missing, "run python tools/models_table.py"


def test_the_page_has_every_model() -> None:
    page = TOOL["FILE"].read_text()
    assert page.startswith(TOOL["HEAD"]), "run python tools/models_table.py"
    named = [line.split(" | ")[0][2:] for line in page.splitlines() if line.startswith("| ")]
    assert named == ["model", *MODELS, "model", *OTHERS], "run python tools/models_table.py"
