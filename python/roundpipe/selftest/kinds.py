"""Devices of one kind, which give the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def by_kind(devices: Iterable[torch.device]) -> dict[str, list[torch.device]]:
    """The devices by the names of their models; in the order given, without repetitions."""
    kinds: dict[str, list[torch.device]] = {}
    for device in dict.fromkeys(devices):
        kinds.setdefault(_kind(device), []).append(device)
    return kinds


def _kind(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type
