"""What Linux says of this process's memory."""

from __future__ import annotations

from pathlib import Path


def peak_resident_bytes() -> int:
    """The most that this process has had resident.

    Not from `resource.getrusage`: there a process that another one started begins with that one's peak.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")
