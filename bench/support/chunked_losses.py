"""Losses of language models in chunks, so that no system holds the logits of a whole microbatch.

Each takes hidden [rows, tokens, width], the head's weight [vocabulary, width] and ids [rows, tokens], shifts the
labels, and returns the mean over all but the last token of each row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CHUNK = 4096


def best_chunked_loss(device: torch.device, folder: Path | None = None) -> tuple[str, Loss]:
    """Liger's, which makes its gradients in the forward, where it is installed; else torch's operators. With a name.

    Args:
        device: what will compute it.
        folder: more packages, which are on that process's path.
    """
    there = importlib.util.find_spec("liger_kernel") or (folder is not None and (folder / "liger_kernel").is_dir())
    if device.type == "cuda" and there:
        return "Liger's", _liger
    return "a recomputed", recomputed_loss


def _shifted(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    return hidden.flatten(0, 1), labels.flatten()


def recomputed_loss(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """By torch's operators; the logits of a chunk are made again in the backward."""
    rows, labels = _shifted(hidden, ids)

    def part(rows: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(rows, weight).float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    parts = zip(rows.split(CHUNK), labels.split(CHUNK), strict=True)
    total = sum(checkpoint(part, some, wanted, weight, use_reentrant=False) for some, wanted in parts)
    return total / (ids.shape[0] * (ids.shape[1] - 1))


def _liger(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    rows, labels = _shifted(hidden, ids)
    return liger_fused_linear_cross_entropy(rows, weight, labels, accum_dtype=torch.float32)
