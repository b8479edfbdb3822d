"""The lines of a run's metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_THE_MACHINE = ("seconds", "devices_busy", "device_bytes", "host_bytes")


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    """All of them."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def repeatable_lines(folder: Path) -> list[dict[str, Any]]:
    """The same without times and memory, which differ from run to run."""
    lines = metric_lines(folder)
    return [{name: value for name, value in line.items() if name not in OF_THE_MACHINE} for line in lines]
