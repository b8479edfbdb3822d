"""What every benchmark prints: the machine it ran on, and its tables."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import roundpipe


class Report:
    """Prints lines as they come; with --out each is in the file at once, so that a run that is cut leaves a report."""

    def __init__(self, title: str, out: Path | None) -> None:
        self._out = out.open("w") if out is not None else None
        self(f"# {title}")
        self("")
        for line in machine():
            self(f"- {line}")
        self("")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        if self._out is not None:
            print(line, file=self._out, flush=True)

    def header(self, cells: Sequence[str]) -> None:
        """Of a markdown table, whose rows follow as they are measured."""
        self.row(cells)
        self("|" + "---:|" * len(cells))

    def row(self, cells: Sequence[str]) -> None:
        self("| " + " | ".join(cells) + " |")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A markdown table, and an empty line."""
        self.header(header)
        for row in rows:
            self.row(row)
        self("")

    def notes(self, notes: Sequence[str]) -> None:
        """What goes below a table whose rows were written one by one."""
        self("")
        for note in notes:
            self(f"- {note}")
        if notes:
            self("")

    def close(self) -> None:
        """Says how busy the machine was in the end, and closes the file."""
        self(f"Load average over the last minute when it ended: {os.getloadavg()[0]:.1f}.")
        if self._out is not None:
            self._out.close()


def machine() -> list[str]:
    """Date, hardware, versions and command."""
    cores = len(os.sched_getaffinity(0))
    program = Path(sys.argv[0]).resolve().relative_to(Path(__file__).parents[2])
    command = shlex.join(["python", str(program), *sys.argv[1:]])
    return [
        f"date: {datetime.date.today().isoformat()}",
        f"CPU: {cpu_model()}, {cores} cores, {torch.get_num_threads()} torch threads",
        f"host memory: {host_gb():.0f} GB",
        f"versions: roundpipe {roundpipe_version()}, torch {torch.__version__}, Python {platform.python_version()}",
        f"commit: {commit()}",
        f"command: `{command}`",
        f"load average over the last minute when it began: {os.getloadavg()[0]:.1f}",
    ]


def host_gb() -> float:
    """Of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def cpu_model() -> str:
    """As /proc/cpuinfo names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """Of this checkout, and whether files differ from it, as git or ROUNDPIPE_COMMIT says it."""
    if "ROUNDPIPE_COMMIT" in os.environ:
        return os.environ["ROUNDPIPE_COMMIT"]
    root = Path(__file__).parents[2]
    git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (", with changes" if changes.stdout.strip() else "")


def roundpipe_version() -> str:
    """From pyproject.toml, where the version stands."""
    for line in (Path(roundpipe.__file__).parents[2] / "pyproject.toml").read_text().splitlines():
        if line.startswith("version ="):
            return line.split('"')[1]
    return "?"


class _Parser(argparse.ArgumentParser):
    """Ends before any work if a package is missing."""

    needs: tuple[str, ...] = ()

    def parse_args(self, *arguments: Any, **options: Any) -> Any:
        parsed = super().parse_args(*arguments, **options)
        missing = [package for package in self.needs if importlib.util.find_spec(package) is None]
        if missing:
            self.exit(2, f"[bench] this needs {', '.join(missing)}, expected to be installed: `make bench` does that\n")
        return parsed


def parser(description: str | None, needs: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """The options that all benchmarks share. `needs`: packages that `make demo` does not install."""
    made = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.needs = needs
    made.add_argument("--quick", action="store_true", help="a few tiny sizes, to see that it runs; says nothing")
    made.add_argument("--out", type=Path, help="write the report to this file, too")
    return made
