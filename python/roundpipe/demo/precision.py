"""Finds, by a short measurement, the type of weights that the machine computes fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roundpipe.machine.meter import matmul_gflops

# bfloat16 costs accuracy, so it must be clearly faster; the margin also keeps the choice the same between runs.
LEAST_SPEEDUP = 1.5


@dataclass(frozen=True)
class PrecisionChoice:
    """The chosen type, and the matrix multiplication speeds that decided, in GFLOP/s; nan where not measured."""

    dtype: torch.dtype
    float32_gflops: float = float("nan")
    bfloat16_gflops: float = float("nan")


def choose_precision(requested: str, device: torch.device) -> PrecisionChoice:
    """The type for `requested` = "float32", "bfloat16" or "auto"; only "auto" measures, about a quarter of a second."""
    if requested == "float32":
        return PrecisionChoice(torch.float32)
    if requested == "bfloat16":
        return PrecisionChoice(torch.bfloat16)
    full = matmul_gflops(device, torch.float32)
    half = matmul_gflops(device, torch.bfloat16)
    return PrecisionChoice(torch.bfloat16 if half >= LEAST_SPEEDUP * full else torch.float32, full, half)
