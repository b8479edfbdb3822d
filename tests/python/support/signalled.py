"""Runs a program that gets a signal once it has printed a line: signalled.py SIGNAL BEGINNING PROGRAM ARGUMENTS...

By itself, since whoever reads the line in another process may send the signal when the program is long past it.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from typing import Any

name, beginning = sys.argv[1:3]
sys.argv = sys.argv[3:]
sys.path[0] = os.path.dirname(sys.argv[0])
show = builtins.print


def shown(*values: Any, **options: Any) -> None:
    show(*values, **options)
    if values and str(values[0]).startswith(beginning):
        sys.stdout.flush()
        os.kill(os.getpid(), getattr(signal, name))


builtins.print = shown
runpy.run_path(sys.argv[0], run_name="__main__")
