"""How every test runs: bytecode, what commands print, torch's threads, how many examples hypothesis tries, Ctrl+C."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Bytecode is kept in the build folder, also where the environment says that none is written: without it, each program
# that a test starts compiles all that it imports, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "bytecode"))

# What commands print is compared as text, so that no terminal's width and no wish for colours may change it.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)

# Models here are so small that threads would mostly wait for each other. Read when torch starts, by programs that
# tests start as well; a number that is set already stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start what runs in the background with Ctrl+C ignored, which programs that tests interrupt would take over.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=300, print_blob=True, deadline=None)
settings.register_profile("thousands", max_examples=2000, print_blob=True, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile=long comes after this

# What tests are made of is there until the end: looking for garbage in it takes a twentieth of the time.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
