"""Builds CMake projects that use the engine as a C++ library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
TORCH = Path(torch.__file__).resolve().parent
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# What tests/cpp_package/main.cpp prints.
PRINTED = "losses and gradients of a plain loop: yes\nerrors of the engine: caught\n"

needs_cmake = pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="cmake is not here")


def run(*command: str | Path, fails: bool = False) -> str:
    """What a command printed; `fails`: whether it is to fail."""
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr
