"""What Linux says of this process's memory, and how another is started whose memory is what it uses.

Not `resource.getrusage`: a process that another one started begins with that one's peak there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def status(field: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, the peak of it; in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field}")


def environment_without_holes() -> dict[str, str]:
    """For a process whose memory is measured: what it frees goes back to the system.

    glibc would keep large tensors in its heap after some time, where memory and address space stay behind.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}


def report_of(program: str, *arguments: str | Path) -> Any:
    """Runs a program of this folder in a process whose memory is measured; what it printed last, which is JSON."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_without_holes())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
