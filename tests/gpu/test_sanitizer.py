"""A short training under NVIDIA's compute-sanitizer. test_programs.py runs the same program without it."""

from __future__ import annotations

import shutil

import pytest
from test_programs import run_program

SANITIZER = "compute-sanitizer"
FOUND = "9"  # the exit status that it is told to give where it has found something


@pytest.mark.parametrize("target", ["card"], indirect=True)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_nothing_is_found(target, tool, monkeypatch):
    program = shutil.which(SANITIZER)
    if target.device != "cuda" or program is None:
        pytest.skip(f"no {SANITIZER} here")
    under = (program, "--tool", tool, "--error-exitcode", FOUND, "--target-processes", "all")
    # Without torch's cache every tensor is an allocation of its own, so that a step beyond its end is seen.
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    done = run_program(target.spec(2), under=under)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "[" in done.stdout
