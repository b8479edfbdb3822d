"""The benchmarks run and check their outputs; nothing is asserted about times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps import mostly_long

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
# test_kit.py runs the one that is left out.
NAMES = sorted(
    path.relative_to(BENCH).with_suffix("").as_posix()
    for path in [*BENCH.glob("*.py"), *BENCH.glob("gpu/*.py")]
    if path.stem != "kit"
)
IN_EVERY_RUN = ("gpu/link",)


@pytest.mark.parametrize("name", mostly_long(NAMES, *IN_EVERY_RUN))
def test_quick(name: str, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    assert "CPU: " in done.stdout and "torch " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_what_is_missing_is_named_before_work_begins(tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'tensorboard' else find(name, *more)\n"
        f"sys.argv, sys.path[0] = ['train.py', '--quick'], {str(BENCH)!r}\n"
        f"runpy.run_path({str(BENCH / 'train.py')!r}, run_name='__main__')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(tmp_path / "without.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1]
        == "[bench] this needs tensorboard, expected to be installed: `make bench` does that"
    )
    assert done.stdout == ""
