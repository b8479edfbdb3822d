"""Writes docs/reference/benchmarks.md: what each program of bench/ measures, from its first lines, and its reports.

python tools/benchmark_reference.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
HEAD = """# Reference of the benchmarks

Each program answers one question, which its first lines state. This page is made from them by
`tools/benchmark_reference.py`; [benchmarks.md](../evidence/benchmarks.md) says how they are run, `--help` has their
options.
"""
COMMAND = re.compile(r"^- command: (.*)$", re.M)
DATE = re.compile(r"^\d{4}-\d\d-\d\d")
# Programs that reports call by another name.
CALLED = {"bench/gpu/kit.py": "make bench-gpu", "bench/transfer.cpp": "bench_transfer"}


def description(program: Path) -> str:
    text = program.read_text(encoding="utf-8")
    if program.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    lines = text.splitlines()
    return "\n".join(line[3:] for line in lines[: next(n for n, line in enumerate(lines) if not line.startswith("//"))])


def programs() -> list[Path]:
    return [*sorted(BENCH.glob("*.py")), *sorted(BENCH.glob("*.cpp")), *sorted((BENCH / "gpu").glob("*.py"))]


def reports_of(program: str) -> Iterator[Path]:
    """Reports whose command is that of the program, the newest first."""
    called = re.compile(rf"(?<![\w/]){re.escape(CALLED.get(program, program))}(?!\w)")
    for report in sorted((BENCH / "results").glob("*.md"), reverse=True):
        found = COMMAND.search(report.read_text(encoding="utf-8"))
        if found and called.search(found[1]):
            yield report


def section(program: Path) -> str:
    name = str(program.relative_to(ROOT))
    parts = [f"## `{name}`", description(program)]
    reports = [f"[{DATE.findall(each.name)[0]}](../../bench/results/{each.name})" for each in reports_of(name)]
    if reports:
        parts.append(f"Reports: {', '.join(reports)}.")
    return "\n\n".join(parts) + "\n"


def page() -> str:
    return "\n".join([HEAD, *map(section, programs())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
