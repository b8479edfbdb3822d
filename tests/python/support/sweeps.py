"""Sweeps over several axes of which `make test` takes a few cases, and `make test-all` many."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest


class LongCases:
    """Whether cases marked `long` are made: to collect and to leave out thousands takes each worker seconds."""

    wanted = True


def sweep(
    names: str,
    *axes: Iterable[Any],
    ids: Callable[[Any], str] | None = None,
    together: int = 2,
    short: Iterable[Any] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes a test over cases that cover `axes`; those beyond a covering few are marked `long`, and have every
    combination of the values of any three axes.

    Args:
        names: of the arguments, separated by commas, in the order of `axes`.
        ids: as pytest's.
        together: every combination of values of so many axes is among the few; 2: each pair, 1: each value,
            0: one case alone.
        short: the values of the first axis that the few have; None: all of them.
    """
    values = [list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    first = list(range(sizes[0])) if short is None else [values[0].index(value) for value in short]
    few = {(first[case[0]], *case[1:]) for case in covering([len(first), *sizes[1:]], together)}
    many = covering(sizes, 3) if LongCases.wanted else set()
    cases = []
    for case in sorted(few | many):
        chosen = [axis[index] for axis, index in zip(values, case, strict=True)]
        cases.append(pytest.param(*chosen, marks=() if case in few else pytest.mark.long))
    return pytest.mark.parametrize(names, cases, ids=ids)


def mostly_long(values: Iterable[Any], *few: Any) -> list[Any]:
    """`values` for a test's parameter, of which all but `few` are marked `long`."""
    return [
        pytest.param(value, marks=() if value in few else pytest.mark.long)
        for value in values
        if value in few or LongCases.wanted
    ]


def covering(sizes: list[int], together: int) -> set[tuple[int, ...]]:
    """A few cases, one index for each axis, in which any `together` axes have every combination of their values."""
    every = list(itertools.product(*map(range, sizes)))
    if together >= len(sizes):
        return set(every)
    groups = list(itertools.combinations(range(len(sizes)), together))
    covers = {case: {(group, tuple(case[axis] for axis in group)) for group in groups} for case in every}
    missing = set().union(*covers.values())
    few: set[tuple[int, ...]] = set()
    uses: Counter[tuple[int, int]] = Counter()
    while missing:
        # Of equals the one whose values were used least, so that they take turns.
        best = max(every, key=lambda case: (len(covers[case] & missing), -sum(uses[use] for use in enumerate(case))))
        few.add(best)
        uses.update(enumerate(best))
        missing -= covers[best]
    return few
