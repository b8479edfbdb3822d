"""The accelerator that a benchmark runs on, without naming a vendor."""

from __future__ import annotations

import platform

import torch


def default_device(virtual: str) -> str:
    """A spec for `roundpipe.devices`: the first accelerator, or `virtual` where torch sees none."""
    if not torch.accelerator.is_available():
        return virtual
    return f"{torch.accelerator.current_accelerator().type}:0"


def has_cuda() -> bool:
    """Whether the published package, which uses torch.cuda by name, can run here."""
    return torch.cuda.is_available()


def describe(spec: str) -> str:
    """One line about the device of `spec`."""
    if spec.startswith("virtual"):
        return f"device: `{spec}`, host threads of {platform.machine()}"
    module = torch.get_device_module(spec.partition(":")[0])
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else "unknown"
    return f"device: `{spec}`, {name}, {module.mem_get_info(0)[1] / 1e9:.0f} GB"


def synchronize() -> None:
    """Waits for the accelerator; nothing without one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
