"""A fixture of the tests of the package and of those of accelerators, which share no conftest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """torch computes on one thread, so that small models are quick and devices do not share its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
