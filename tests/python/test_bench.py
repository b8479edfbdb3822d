"""The benchmarks run and check their outputs; nothing is asserted about times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


PROGRAMS = sorted((ROOT / "bench").glob("*.py")) + sorted((ROOT / "bench" / "gpu").glob("*.py"))


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda path: path.relative_to(ROOT / "bench").with_suffix("").as_posix()
)
def test_quick(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(program), "--quick", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    assert "CPU: " in done.stdout and "torch " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
