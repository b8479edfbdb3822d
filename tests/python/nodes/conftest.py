"""The process that the tests of several files fork their nodes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from node_processes import NodeProcesses
from robustness import script_environment


@pytest.fixture(scope="session")
def nodes() -> Iterator[NodeProcesses]:
    """One that has imported all that any of them needs: to import it takes longer than most tests."""
    with NodeProcesses(script_environment(), preload=("train_programs",)) as processes:
        yield processes
