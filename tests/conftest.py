"""How every test runs: torch's threads, and how many examples hypothesis tries, and Ctrl+C."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Models here are so small that threads would mostly wait for each other. Read when torch starts, by programs that
# tests start as well; a number that is set already stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start what runs in the background with Ctrl+C ignored, which programs that tests interrupt would take over.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=300, print_blob=True, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile=long comes after this
