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
    from roundpipe.checkpoints.runs.journal import RunJournal, read_journal
    from roundpipe.checkpoints.runs.stop_signal import StopSignal
    from roundpipe.checkpoints.saving.load import Loaded, latest, load_checkpoint
    from roundpipe.checkpoints.saving.save import Save, SaveReport, save_checkpoint
    from roundpipe.device.pool import DevicePool, devices
    from roundpipe.following.layers.emulated import EmulatedLayer
    from roundpipe.following.layers.recompute import doing_recompute, get_recompute_data, save_for_recompute
    from roundpipe.huggingface.pretrained import from_pretrained
    from roundpipe.model.call.execute_plan import ModelExecutePlan
    from roundpipe.model.call.run_config import RoundPipeRunConfig
    from roundpipe.model.memory.host import HostArena, host_arena
    from roundpipe.model.memory.prediction import MemoryPrediction
    from roundpipe.model.pending import Pending
    from roundpipe.model.pipe import RoundPipe
    from roundpipe.model.step.fused_optimizer import Step
    from roundpipe.model.step.optimizer_context import OptimizerCtx
    from roundpipe.model.step.scaler import GradScaler
    from roundpipe.model.wrap import AutoRoundPipe, wrap_model_to_roundpipe

# The module of each public name; imported on first use, so that `roundpipe --help` does not wait for torch.
_PUBLIC = {
    "AutoRoundPipe": "model.wrap",
    "DevicePool": "device.pool",
    "EmulatedLayer": "following.layers.emulated",
    "GradScaler": "model.step.scaler",
    "HostArena": "model.memory.host",
    "Loaded": "checkpoints.saving.load",
    "MemoryPrediction": "model.memory.prediction",
    "ModelExecutePlan": "model.call.execute_plan",
    "OptimizerCtx": "model.step.optimizer_context",
    "Pending": "model.pending",
    "RoundPipe": "model.pipe",
    "RoundPipeError": "_core",
    "RoundPipeRunConfig": "model.call.run_config",
    "RunJournal": "checkpoints.runs.journal",
    "Save": "checkpoints.saving.save",
    "SaveReport": "checkpoints.saving.save",
    "Step": "model.step.fused_optimizer",
    "StopSignal": "checkpoints.runs.stop_signal",
    "devices": "device.pool",
    "doing_recompute": "following.layers.recompute",
    "from_pretrained": "huggingface.pretrained",
    "get_recompute_data": "following.layers.recompute",
    "host_arena": "model.memory.host",
    "latest": "checkpoints.saving.load",
    "load_checkpoint": "checkpoints.saving.load",
    "read_journal": "checkpoints.runs.journal",
    "save_checkpoint": "checkpoints.saving.save",
    "save_for_recompute": "following.layers.recompute",
    "wrap_model_to_roundpipe": "model.wrap",
}

# Modules that scripts access as attributes, most of them scripts for the published package.
_MODULES = frozenset(
    {
        *("batch", "context", "device", "distributed", "grad_scaler", "models", "optim", "roundpipe", "run_config"),
        *("scheduler", "timer", "wrapper"),
    }
)

__all__ = [
    "AutoRoundPipe",
    "DevicePool",
    "EmulatedLayer",
    "GradScaler",
    "HostArena",
    "Loaded",
    "MemoryPrediction",
    "ModelExecutePlan",
    "OptimizerCtx",
    "Pending",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipeRunConfig",
    "RunJournal",
    "Save",
    "SaveReport",
    "Step",
    "StopSignal",
    "devices",
    "doing_recompute",
    "from_pretrained",
    "get_recompute_data",
    "host_arena",
    "latest",
    "load_checkpoint",
    "optim",
    "read_journal",
    "save_checkpoint",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return package_version()
    if name not in _PUBLIC and name not in _MODULES:
        raise AttributeError(f"module 'roundpipe' has no attribute '{name}'")
    import torch  # noqa: F401  the extension finds torch's libraries through it

    if name in _MODULES:
        return importlib.import_module(f"roundpipe.{name}")
    value = getattr(importlib.import_module(f"roundpipe.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
