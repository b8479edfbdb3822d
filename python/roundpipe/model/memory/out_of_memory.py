"""Messages about a device without memory for a call: the error, and the warning when a retry took longer."""

from __future__ import annotations

import inspect
import traceback
import warnings

import torch


def warn(notice: str) -> None:
    """Warns, at the line outside this package and torch that made the engine warn."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("roundpipe", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(notice, RuntimeWarning, stacklevel=level)


def said(error: BaseException, lines: str) -> torch.OutOfMemoryError:
    """Makes the error for a device without memory, with further lines. Its cause is `error`, whose frames are cleared:
    they hold tensors."""
    traceback.clear_frames(error.__traceback__)
    first = str(error).rstrip() or "[RoundPipe] out of memory"
    told = torch.OutOfMemoryError(f"{first}\n{lines}")
    told.__cause__ = error
    return told
