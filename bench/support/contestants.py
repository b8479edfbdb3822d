"""Who takes part in bench/gpu/kit.py, and why somebody does not."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from support.accelerator import has_cuda
from support.training_request import Recompute, Request

Mode = Literal["sync", "async"]


@dataclass(frozen=True)
class Contestant:
    """A system that trains.

    Attributes:
        folder: has its packages; None: this Python's.
        modes: the steps that it can make.
        recomputes: the ways to recompute that are tried; the first is for the longest row.
        microbatches: of every batch; 0: as many as are best.
        settings: what it was given, in words.
        missing: why it cannot run here; empty: it can.
        uncapped: why its device memory cannot be capped here; empty: it can.
    """

    name: str
    request: Request
    folder: Path | None = None
    modes: tuple[Mode, ...] = ("sync",)
    recomputes: tuple[Recompute, ...] = ("layers",)
    microbatches: int = 0
    settings: str = ""
    missing: str = ""
    uncapped: str = ""


def contestants(request: Request, peers: Path | None) -> tuple[Contestant, list[Contestant]]:
    """Ours and the others, of `request`, which asks for ours; who says most comes first.

    Args:
        request: what to train.
        peers: the folder of those that are not among this Python's packages, if any.
    """
    from support.chunked_losses import best_chunked_loss

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    loss = f"{best_chunked_loss(device, peers)[0]} chunked loss"
    uncapped = "" if torch.accelerator.is_available() else "it computes in the host's own memory, which has no cap"
    others = [
        Contestant(
            "roundpipe 0.1.1",
            replace(request, way="chain", peer=True),
            peers,
            ("sync", "async"),
            settings="a chain of the model's parts, its own chunked loss, fp32 optimizer parameters",
            missing=_missing("roundpipe", peers, ours=True),
        ),
        Contestant(
            "FSDP2, CPU offload",
            replace(request, way="fsdp2"),
            peers,
            recomputes=("layers", "none"),
            settings=f"16-bit uploads, fp32 masters on the host, {loss}",
            missing="" if torch.distributed.is_available() else "this torch was built without torch.distributed",
            uncapped=uncapped,
        ),
        Contestant(
            "plain loop",
            replace(request, way="plain"),
            peers,
            recomputes=("layers", "none"),
            settings=f"weights, fp32 masters and moments on the card, {loss}: the limit where they fit",
            uncapped=uncapped,
        ),
        Contestant(
            "DeepSpeed ZeRO-3 offload",
            replace(request, way="zero3"),
            peers,
            settings=f"parameters and optimizer on the host, its CPU Adam, {loss}",
            missing=_missing("deepspeed", peers),
            uncapped=uncapped,
        ),
        Contestant(
            "TrainStream 0.4.1",
            replace(request, way="trainstream"),
            peers,
            microbatches=1,
            settings=f"optimizer on the host, weights on the card as far as they fit, one microbatch, {loss}",
            missing=_missing("trainstream", peers) or ("" if has_cuda() else "it needs CUDA"),
            uncapped=uncapped,
        ),
    ]
    return Contestant("ours", request, None, ("sync", "async"), settings="transformers' model, followed"), others


def _missing(package: str, folder: Path | None, ours: bool = False) -> str:
    """Why `package` is not there; `ours`: one of this name is always there, and is not meant."""
    if folder is not None and (folder / package).is_dir():
        return "" if not ours or has_cuda() else "it needs CUDA"
    if not ours and importlib.util.find_spec(package):
        return ""
    return f"{folder} holds no {package}" if folder else "not installed, and no folder was given (PEER=DIR)"
