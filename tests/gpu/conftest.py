"""Cases for a real accelerator, each of which runs on virtual devices as well.

The cases for a card are skipped where torch sees none, and fail instead with ROUNDPIPE_REQUIRE_GPU=1. The test card of
docs/extending.md is one as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

# cuBLAS gives the same bits on every stream only with fixed workspaces; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

import roundpipe
from torch_threads import one_torch_thread as one_torch_thread

REQUIRED = os.environ.get("ROUNDPIPE_REQUIRE_GPU") == "1"


@dataclass(frozen=True)
class Target:
    """Where a case runs: on virtual devices, or on the first card, or one worker on each of several.

    Attributes:
        device: torch's name of the plain model's device, for example "cuda"; "cpu" beside virtual devices.
        cards: how many cards the workers are spread over; each of several holds one.
    """

    device: str
    cards: int = 1

    @property
    def is_card(self) -> bool:
        return self.device != "cpu"

    def spec(self, workers: int, memory_bytes: int = 0) -> str:
        """That many workers, each with that cap."""
        if not self.is_card:
            devices = f"virtual:{workers}"
        elif self.cards == 1:
            devices = f"{self.device}:0x{workers}"
        else:
            devices = ",".join(f"{self.device}:{index}" for index in range(workers))
        return f"{devices},memory={memory_bytes}B" if memory_bytes else devices

    def pool(self, workers: int, memory_bytes: int = 0) -> roundpipe.DevicePool:
        return roundpipe.devices(self.spec(workers, memory_bytes))

    def synchronize(self) -> None:
        for index in range(self.cards if self.is_card else 0):
            torch.accelerator.synchronize(index)


def make_target(kind: str) -> Target:
    if kind == "virtual":
        return Target("cpu")
    if not torch.accelerator.is_available():
        if REQUIRED:
            pytest.fail("ROUNDPIPE_REQUIRE_GPU=1, but torch sees no accelerator")
        pytest.skip("torch sees no accelerator")
    cards = 2 if kind == "cards" else 1
    if torch.accelerator.device_count() < cards:
        pytest.skip("torch sees one accelerator only")
    return Target(torch.accelerator.current_accelerator().type, cards)


# `make bench-gpu` runs these files without the conftest of the folder above, which asks for more packages.
@pytest.fixture(autouse=True)
def quick(one_torch_thread: None) -> None:
    """Small models are quick."""


VIRTUAL = pytest.mark.long  # `make test` runs the cards' on the test card


@pytest.fixture(params=[pytest.param("virtual", marks=VIRTUAL), "card"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """For cases that make pools of their own."""
    target = make_target(request.param)
    yield target
    target.synchronize()
    roundpipe.devices("virtual:1")  # takes caps back


@pytest.fixture(params=[pytest.param("virtual-2", marks=VIRTUAL), "card-1", "card-2", "card-4", "cards-2"])
def pool(request: pytest.FixtureRequest) -> Iterator[roundpipe.DevicePool]:
    """Two virtual devices; one worker on the first card, several that share it, and one on each of two cards."""
    kind, _, workers = request.param.partition("-")
    target = make_target(kind)
    yield target.pool(int(workers))
    target.synchronize()


@pytest.fixture
def accelerator(pool: roundpipe.DevicePool) -> str:
    """torch's name of the pool's kind of device, for example "cuda"."""
    return torch.device(pool.torch_devices[0]).type
