"""The checks that come before figures: equality with plain PyTorch, and the short form of tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from support.budget import Deadline

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Check:
    """`wrong` is empty where all is well; `note` says more of what was done."""

    name: str
    wrong: str
    note: str = ""


def equality(spec: str, deadline: Deadline) -> list[Check]:
    """See equality.py."""
    name = "equality with plain PyTorch"
    done = _run([str(ROOT / "bench" / "support" / "equality.py"), spec], deadline)
    if isinstance(done, str):
        return [Check(name, done)]
    if done.returncode != 0:
        return [Check(name, _last_line(done))]
    return [Check(*entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def card_tests(on_card: bool, deadline: Deadline) -> Check:
    """The tests of tests/gpu with the mark `kit`, on the first card or on virtual devices."""
    name = "the short form of tests/gpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        tests = ROOT / "tests" / "gpu"
        files = [path for path in sorted(tests.glob("test_*.py")) if "mark.kit" in path.read_text()]
        command = ["-m", "pytest", *map(str, files), "--rootdir", str(ROOT), "-m", "kit", "-q"]
        # Without what the tests above this folder ask for, which need not be installed.
        command += ["--confcutdir", str(tests), "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-k", "card" if on_card else "virtual"]
        done = _run(command, deadline, {"ROUNDPIPE_REQUIRE_GPU": "1"} if on_card else {})
        if isinstance(done, str):
            return Check(name, done)
        if not report.exists():
            return Check(name, _last_line(done))
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        failed = [
            case.get("name", "?")
            for case in suite
            if case.find("failure") is not None or case.find("error") is not None
        ]
        skipped = int(suite.get("skipped", 0))
        passed = int(suite.get("tests", 0)) - skipped - len(failed)
    note = f"{passed} passed, {skipped} skipped"
    if failed:
        return Check(name, f"{len(failed)} failed: {', '.join(failed[:8])}", note)
    return Check(name, "" if passed and done.returncode == 0 else f"pytest ended with {done.returncode}", note)


def bench_program(name: str, arguments: list[str], deadline: Deadline) -> str:
    """The body of another benchmark's report: what stands between its device and its last line.

    Raises:
        RuntimeError: it failed.
    """
    done = _run([str(ROOT / "bench" / f"{name}.py"), *arguments], deadline)
    if isinstance(done, str):
        raise RuntimeError(done)
    if done.returncode != 0:
        raise RuntimeError(_last_line(done))
    body = done.stdout.partition("- device: ")[2].partition("\n")[2]
    return body.rpartition("Load average")[0].strip()


def _run(
    arguments: list[str], deadline: Deadline, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | str:
    """What Python did with `arguments`, or why it was stopped."""
    paths = [str(ROOT / "python"), str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (more or {})
    command, limit_s = [sys.executable, *arguments], deadline.left_s
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"stopped: no end within {limit_s:.0f} s"


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"
