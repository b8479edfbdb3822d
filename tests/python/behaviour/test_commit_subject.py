"""tools/commit_subject.py, which pre-commit runs on the message of a commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "commit_subject.py"


def check(tmp_path: Path, message: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "message"
    path.write_text(message)
    return subprocess.run([sys.executable, PROGRAM, path], capture_output=True, text=True)


@pytest.mark.parametrize(
    "message",
    [
        "runtime: retry keeps its loss function\n",
        "bench/gpu, docs: one table\n\nWhy.\n",
        "a: " + "x" * 69,
        "# git's comment\nruntime: retry\n# another\n\nWhy.\n",
        "Merge branch 'links'\n",
        'Revert "Something without a scope that is longer than a subject should ever be, by far"\n',
    ],
)
def test_accepted(tmp_path: Path, message: str) -> None:
    result = check(tmp_path, message)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Retry keeps its loss function\n", "no scope"),
        ("runtime:\n", "no scope"),
        ("a: " + "x" * 70, "73 characters"),
        ("runtime: retry\nwhy\n", "second line"),
    ],
)
def test_refused(tmp_path: Path, message: str, says: str) -> None:
    result = check(tmp_path, message)
    assert result.returncode == 1 and says in result.stderr
