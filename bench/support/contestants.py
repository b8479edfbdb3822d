"""Who takes part in bench/gpu/kit.py, and why somebody does not."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from support.accelerator import has_cuda
from support.training_request import Request

Mode = Literal["sync", "async"]


@dataclass(frozen=True)
class Contestant:
    """A system that trains.

    Attributes:
        folder: has its packages; None: this Python's.
        modes: the steps that it can make.
        missing: why it cannot run here; empty: it can.
        uncapped: why its device memory cannot be capped here; empty: it can.
    """

    name: str
    request: Request
    folder: Path | None = None
    modes: tuple[Mode, ...] = ("sync",)
    missing: str = ""
    uncapped: str = ""


def contestants(
    request: Request, published: Path | None, deepspeed: Path | None
) -> tuple[Contestant, list[Contestant]]:
    """Ours and the others, of `request`, which asks for ours.

    Args:
        request: what to train.
        published: the folder of the published package, if any.
        deepspeed: the folder of DeepSpeed, if it is not one of this Python's packages.
    """
    uncapped = "" if torch.accelerator.is_available() else "it computes in the host's own memory, which has no cap"
    peers = [
        Contestant(
            "roundpipe 0.1.1",
            replace(request, way="chain", peer=True),
            published,
            ("async", "sync"),
            missing=_published_missing(published),
        ),
        Contestant(
            "FSDP2, CPU offload",
            replace(request, way="fsdp2"),
            missing="" if torch.distributed.is_available() else "this torch was built without torch.distributed",
            uncapped=uncapped,
        ),
        Contestant(
            "DeepSpeed ZeRO-3 offload",
            replace(request, way="zero3"),
            deepspeed,
            missing=_deepspeed_missing(deepspeed),
            uncapped=uncapped,
        ),
    ]
    return Contestant("ours", request, None, ("async", "sync")), peers


def _published_missing(folder: Path | None) -> str:
    if folder is None:
        return "no folder of it was given (PEER=DIR, --peer DIR)"
    if not (folder / "roundpipe").is_dir():
        return f"{folder} holds no roundpipe"
    return "" if has_cuda() else "it needs CUDA"


def _deepspeed_missing(folder: Path | None) -> str:
    if folder is not None:
        return "" if (folder / "deepspeed").is_dir() else f"{folder} holds no deepspeed"
    return "" if importlib.util.find_spec("deepspeed") else "not installed"
