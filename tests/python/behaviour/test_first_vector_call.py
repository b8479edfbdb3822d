"""A process's first vector function rounds like all later ones, whatever number of threads computes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROCESSES = 24
PROGRAM = """
import torch
from roundpipe import RoundPipe
torch.set_num_threads(2)
angles = torch.outer(torch.arange(128.0), torch.rand(64, generator=torch.Generator().manual_seed(0)))
print(torch.equal(angles.cos(), angles.cos()))
"""


@pytest.mark.long
def test_first_vector_function_has_the_bits_of_later_ones() -> None:
    # Without settle_vector_math, one process in ten differs on a processor with AMX.
    said = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True) for _ in range(PROCESSES)]
    assert [run.stdout.strip() for run in said] == ["True"] * PROCESSES, said[0].stderr
