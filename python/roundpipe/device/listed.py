"""The devices of the pool, as scripts for the published package read them. See `roundpipe.devices`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.device.pool import devices


@dataclass(frozen=True)
class Device:
    """One device of the pool.

    Attributes:
        id: its number in the pool.
        device: torch's device for its tensors; the CPU for a virtual device.
    """

    id: int
    device: torch.device


def get_num_devices() -> int:
    """How many devices the pool has."""
    return len(devices())


def __getattr__(name: str) -> Any:
    # Made on each access, because the pool may have been replaced.
    if name == "device_list":
        return [Device(number, torch.device(device)) for number, device in enumerate(devices().torch_devices)]
    raise AttributeError(f"module 'roundpipe.device' has no attribute '{name}'")
