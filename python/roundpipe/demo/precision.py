"""Finds, by a short measurement, the type of weights that the machine computes fast."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

# bfloat16 costs accuracy, so it must be clearly faster; the margin also keeps the choice the same between runs.
LEAST_SPEEDUP = 1.5


@dataclass(frozen=True)
class PrecisionChoice:
    """The chosen type, and the matrix multiplication speeds that decided, in GFLOP/s; nan where not measured."""

    dtype: torch.dtype
    float32_gflops: float = float("nan")
    bfloat16_gflops: float = float("nan")


def _matmul_gflops(device: torch.device, dtype: torch.dtype, size: int = 512, least_s: float = 0.1) -> float:
    matrix = torch.ones(size, size, device=device).to(dtype)

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    matrix @ matrix
    finish()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < least_s:
        matrix @ matrix
        finish()
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - start) / 1e9


def choose_precision(requested: str, device: torch.device) -> PrecisionChoice:
    """The type for `requested` = "float32", "bfloat16" or "auto"; only "auto" measures, about a quarter of a second."""
    if requested == "float32":
        return PrecisionChoice(torch.float32)
    if requested == "bfloat16":
        return PrecisionChoice(torch.bfloat16)
    full = _matmul_gflops(device, torch.float32)
    half = _matmul_gflops(device, torch.bfloat16)
    return PrecisionChoice(torch.bfloat16 if half >= LEAST_SPEEDUP * full else torch.float32, full, half)
