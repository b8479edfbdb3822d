"""What every benchmark prints: the machine it ran on, and its tables."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import roundpipe


class Report:
    """Prints lines as they come; with --out it also writes them to a file in the end."""

    def __init__(self, title: str, out: Path | None) -> None:
        self._lines: list[str] = []
        self._out = out
        self(f"# {title}")
        self("")
        for line in machine():
            self(f"- {line}")
        self("")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A markdown table."""
        self("| " + " | ".join(header) + " |")
        self("|" + "---:|" * len(header))
        for row in rows:
            self("| " + " | ".join(row) + " |")
        self("")

    def close(self) -> None:
        """Says how busy the machine was in the end, and writes the file if there is to be one."""
        self(f"Load average over the last minute when it ended: {os.getloadavg()[0]:.1f}.")
        if self._out is not None:
            self._out.write_text("\n".join(self._lines) + "\n")


def machine() -> list[str]:
    """Date, hardware, versions and command."""
    cores = len(os.sched_getaffinity(0))
    program = Path(sys.argv[0]).resolve().relative_to(Path(__file__).parents[2])
    command = shlex.join(["python", str(program), *sys.argv[1:]])
    return [
        f"date: {datetime.date.today().isoformat()}",
        f"CPU: {cpu_model()}, {cores} cores, {torch.get_num_threads()} torch threads",
        f"versions: roundpipe {roundpipe_version()}, torch {torch.__version__}, Python {platform.python_version()}",
        f"command: `{command}`",
        f"load average over the last minute when it began: {os.getloadavg()[0]:.1f}",
    ]


def cpu_model() -> str:
    """As /proc/cpuinfo names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def roundpipe_version() -> str:
    """From pyproject.toml, where the version stands."""
    for line in (Path(roundpipe.__file__).parents[2] / "pyproject.toml").read_text().splitlines():
        if line.startswith("version ="):
            return line.split('"')[1]
    return "?"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a few tiny sizes, to see that it runs; says nothing")
    made.add_argument("--out", type=Path, help="write the report to this file, too")
    return made
