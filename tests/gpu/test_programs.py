"""A training program as a whole: its end, and a fault of the device in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import roundpipe

PROGRAM = Path(__file__).parent / "short_training.py"
PACKAGE = Path(roundpipe.__file__).parents[1]


def run_program(*arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs short_training.py with `arguments`, under the programs in `under`."""
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*under, sys.executable, str(PROGRAM), *arguments]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_it_may_end_at_once_and_workers_do_not_matter(target):
    one, three = run_program(target.spec(1)), run_program(target.spec(3), "at once")
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    assert one.stderr == three.stderr == ""
    assert one.stdout == three.stdout
    assert one.stdout.startswith("[")


def test_a_fault_of_the_device_ends_in_an_error_and_not_in_silence(target):
    done = run_program(target.spec(2), "fault")
    assert done.stdout.startswith("[")
    if target.is_card:
        # The card is lost to the process; torch's allocator may even end it while the error is on its way.
        assert done.returncode != 0
        assert "rror" in done.stderr, done.stderr
    else:
        assert done.returncode == 1, (done.returncode, done.stderr)
        assert "IndexError: index out of range" in done.stderr, done.stderr
