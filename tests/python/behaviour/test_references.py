"""docs/reference/ is what the tools make of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_the_python_package() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "python_reference.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run python tools/python_reference.py"


def test_the_page_of_the_commands() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "command_reference.py"))
    of_roundpipe, title, _ = tool["PAGE"].read_text().partition("## The program `roundpipe-train`")
    assert title
    assert of_roundpipe.rstrip() == tool["of_roundpipe"]().rstrip(), "run python tools/command_reference.py"


def test_the_page_of_the_program_of_cpp() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "command_reference.py"))
    if not tool["PROGRAM"].exists():
        pytest.skip("make build-tests has not made the program")
    assert tool["PAGE"].read_text().endswith(tool["of_roundpipe_train"]()), "run python tools/command_reference.py"
