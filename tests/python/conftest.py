"""What several test files set up alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import roundpipe


@pytest.fixture(autouse=True, scope="module")
def pool_of_a_file() -> None:
    """A file's tests begin with this pool, not with what the file before it has left: a cap on memory, for example."""
    roundpipe.devices("virtual:2")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """torch computes on one thread, so that small models are quick and devices do not share its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_device(one_torch_thread: None) -> None:
    """A virtual device that writes over what is freed."""
    roundpipe.devices("virtual:1,debug")


@pytest.fixture
def two_devices(one_torch_thread: None) -> None:
    """Two of them."""
    roundpipe.devices("virtual:2,debug")
