"""What several test files set up alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import roundpipe
from programs import ProgramRunner
from robustness import script_environment
from sweeps import LongCases
from torch_threads import one_torch_thread as one_torch_thread


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
