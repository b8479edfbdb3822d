"""The mistakes that `make test-mutants` plants still have their place in the engine."""

from __future__ import annotations

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_has_one_place(mutant):
    text = (mutants.ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
