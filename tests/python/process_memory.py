"""What Linux says of this process's memory.

Not `resource.getrusage`: a process that another one started begins with that one's peak there.
"""

from __future__ import annotations

from pathlib import Path


def status(field: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, the peak of it; in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field}")
