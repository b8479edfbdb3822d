"""Processes that the tests of several files fork their nodes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from node_processes import NodeProcesses
from robustness import script_environment


@pytest.fixture(scope="session")
def nodes() -> Iterator[NodeProcesses]:
    with NodeProcesses(script_environment()) as processes:
        yield processes


@pytest.fixture(scope="session")
def language_nodes() -> Iterator[NodeProcesses]:
    """These have imported a model of transformers."""
    with NodeProcesses(script_environment(), preload=("transformers.models.llama.modeling_llama",)) as processes:
        yield processes
