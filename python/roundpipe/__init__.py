"""Trains models whose weights live in host memory, on devices that hold one stage at a time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from roundpipe.compatibility import package_version, require_fitting_build

require_fitting_build()

if TYPE_CHECKING:
    __version__: str

    from roundpipe import optim
    from roundpipe._core import RoundPipeError
    from roundpipe.binding import Step
    from roundpipe.device_pool import DevicePool, devices
    from roundpipe.emulated import EmulatedLayer
    from roundpipe.execute_plan import ModelExecutePlan
    from roundpipe.host_memory import HostArena, host_arena
    from roundpipe.optimizer_context import OptimizerCtx
    from roundpipe.pending import Pending
    from roundpipe.pipe import RoundPipe
    from roundpipe.pretrained import from_pretrained
    from roundpipe.recompute import doing_recompute, get_recompute_data, save_for_recompute
    from roundpipe.run_config import RoundPipeRunConfig
    from roundpipe.scaler import GradScaler
    from roundpipe.step_memory import MemoryPrediction
    from roundpipe.wrap import AutoRoundPipe, wrap_model_to_roundpipe

# Where each public name lives; imported when first used, so that `roundpipe --help` does not wait for torch.
_PUBLIC = {
    "AutoRoundPipe": "wrap",
    "DevicePool": "device_pool",
    "EmulatedLayer": "emulated",
    "GradScaler": "scaler",
    "HostArena": "host_memory",
    "MemoryPrediction": "step_memory",
    "ModelExecutePlan": "execute_plan",
    "OptimizerCtx": "optimizer_context",
    "Pending": "pending",
    "RoundPipe": "pipe",
    "RoundPipeError": "_core",
    "RoundPipeRunConfig": "run_config",
    "Step": "binding",
    "devices": "device_pool",
    "doing_recompute": "recompute",
    "from_pretrained": "pretrained",
    "get_recompute_data": "recompute",
    "host_arena": "host_memory",
    "save_for_recompute": "recompute",
    "wrap_model_to_roundpipe": "wrap",
}

__all__ = [
    "AutoRoundPipe",
    "DevicePool",
    "EmulatedLayer",
    "GradScaler",
    "HostArena",
    "MemoryPrediction",
    "ModelExecutePlan",
    "OptimizerCtx",
    "Pending",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipeRunConfig",
    "Step",
    "devices",
    "doing_recompute",
    "from_pretrained",
    "get_recompute_data",
    "host_arena",
    "optim",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return package_version()
    if name not in _PUBLIC and name != "optim":
        raise AttributeError(f"module 'roundpipe' has no attribute '{name}'")
    import torch  # noqa: F401  the extension finds torch's libraries through it

    if name == "optim":
        return importlib.import_module("roundpipe.optim")
    value = getattr(importlib.import_module(f"roundpipe.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
