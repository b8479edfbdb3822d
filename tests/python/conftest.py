"""What several test files set up alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

import roundpipe
from programs import ProgramRunner
from robustness import script_environment
from sweeps import LongCases
from torch_threads import one_torch_thread as one_torch_thread

# The engine aborts if what is the user's would run with a lock of its own held: see `require_no_locks`.
os.environ.setdefault("ROUNDPIPE_DEBUG_LOCKS", "1")
# Kernels of an older processor, as a user may choose them, do not pack what oneDNN asks them to for a newer one.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# For devices that nobody has used yet, torch keeps every manual_seed() with its traceback, which takes longer than all
# else in many tests. Here there are none.
for kind in (torch.cuda, torch.mtia, torch.xpu):
    for module in (kind, sys.modules.get(f"{kind.__name__}.random")):
        if hasattr(module, "_lazy_call") and not kind.is_available():
            module._lazy_call = lambda *_, **__: None


def pytest_configure(config: pytest.Config) -> None:
    LongCases.wanted = config.option.markexpr != "not long"


@pytest.fixture(autouse=True, scope="module")
def pool_of_a_file() -> None:
    """A file's tests begin with this pool, not with what the file before it has left: a cap on memory, for example."""
    roundpipe.devices("virtual:2")


@pytest.fixture(scope="session")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner(script_environment()) as made:
        yield made


@pytest.fixture
def one_device(one_torch_thread: None) -> None:
    """A virtual device that writes over what is freed."""
    roundpipe.devices("virtual:1,debug")


@pytest.fixture
def two_devices(one_torch_thread: None) -> None:
    """Two of them."""
    roundpipe.devices("virtual:2,debug")
