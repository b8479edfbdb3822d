"""How every test runs: torch's threads, and how many examples hypothesis tries."""

from __future__ import annotations

import os

# Models here are so small that threads would mostly wait for each other. Read when torch starts, by programs that
# tests start as well; a number that is set already stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=300, print_blob=True, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile=long comes after this
