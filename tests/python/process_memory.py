"""What Linux says of this process's memory, and how another is started whose memory is what it uses.

Not `resource.getrusage`: a process that another one started begins with that one's peak there.
"""

from __future__ import annotations

import os
from pathlib import Path


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
