"""What the tests of `language_program` share: the running program, and folders of the models of a test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from language_program import Program


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    from language_program import Program

    made = Program()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of the module's CONFIGS, made when it is first asked for."""
    from language_program import make_folder

    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = make_folder(tmp_path_factory.mktemp("model"), request.module.CONFIGS[name])
        return made[name]

    return of
