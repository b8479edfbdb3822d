"""Runs the Python examples of the README and of every page in docs/.

A block that starts with "```python" is a program of its own; one that starts with "```python no-run" is only shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import ProgramRunner

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python[ \t]*(?P<flag>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#]+)(#[^)]*)?\)")


def examples() -> list[tuple[str, str, str]]:
    """(id, flag, code) of every block; the code starts on its own line of the page, so tracebacks point there."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            found.append((f"{page.relative_to(ROOT)}:{line + 1}", block["flag"].strip(), "\n" * line + block["code"]))
    return found


EXAMPLES = examples()


def test_the_readme_has_an_example_that_runs() -> None:
    assert any(name.startswith("README.md") and flag == "" for name, flag, _ in EXAMPLES)


@pytest.mark.parametrize("flag", sorted({flag for _, flag, _ in EXAMPLES}))
def test_flags_are_known(flag: str) -> None:
    assert flag in ("", "no-run")


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner({**os.environ, "ROUNDPIPE_DEVICES": "virtual:2,debug"}) as runner:
        yield runner


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, flag, code in EXAMPLES if flag == ""])
def test_example_runs(code: str, runner: ProgramRunner, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(code)
    result = runner.run(program, cwd=tmp_path)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(page.read_text()):
        if "://" not in link["target"]:
            assert (page.parent / link["target"]).exists(), link["target"]


def test_headers_named_in_the_readme_exist() -> None:
    named = re.findall(r"`((?:python/)?roundpipe/[\w/]+\.(?:h|py))`", (ROOT / "README.md").read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
