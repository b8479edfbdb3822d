"""Cases for a real accelerator: skipped where torch sees none, failing instead with ROUNDPIPE_REQUIRE_GPU=1."""

from __future__ import annotations

import os

# cuBLAS gives the same bits on every stream only with fixed workspaces; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

REQUIRED = os.environ.get("ROUNDPIPE_REQUIRE_GPU") == "1"


@pytest.fixture(autouse=True)
def accelerator() -> str:
    """torch's name of the accelerator, for example "cuda"."""
    if not torch.accelerator.is_available():
        if REQUIRED:
            pytest.fail("ROUNDPIPE_REQUIRE_GPU=1, but torch sees no accelerator")
        pytest.skip("torch sees no accelerator")
    return torch.accelerator.current_accelerator().type


@pytest.fixture(params=["0", "0x2", "0x4"])
def pool(request: pytest.FixtureRequest, accelerator: str):
    """One worker on the first card, then several that share it."""
    import roundpipe

    pool = roundpipe.devices(f"{accelerator}:{request.param}")
    yield pool
    torch.accelerator.synchronize()
