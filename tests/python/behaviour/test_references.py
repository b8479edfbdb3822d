"""docs/reference/ is what the tools make of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

from roundpipe.cli import app

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_the_python_package() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "python_reference.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run python tools/python_reference.py"


def test_the_page_of_the_benchmarks() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "benchmark_reference.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run python tools/benchmark_reference.py"


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


def test_the_page_has_the_options_that_typer_reads() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "command_reference.py"))
    for title, command in tool["commands"](app, "roundpipe"):
        read: Any = typer.main.get_command(app)
        for name in title.split()[1:]:
            read = read.commands[name]
        aliases = {tool["written"](alias) for others in tool["ALIASES"].values() for alias in others}
        left_out = {"--help"} | (aliases if title == "roundpipe train" else set())
        options = {name for each in read.params for name in each.opts if name.startswith("--")} - left_out
        rows = [option for option in tool["options_of"](command) if not option.is_argument]
        assert {re.findall(r"--[\w-]+", option.names)[0] for option in rows} == options, title
