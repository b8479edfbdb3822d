"""What an epoch has of which source, and what is held out."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.data.records.views import Mixture, held_out_records

PARTS = st.lists(
    st.tuples(st.integers(0, 9), st.fractions(Fraction(1, 10), 3, max_denominator=10)), min_size=1, max_size=4
)


@given(parts=PARTS, seed=st.none() | st.integers(0, 3), epochs=st.integers(1, 6))
def test_each_source_appears_as_often_as_its_weight_says(
    parts: list[tuple[int, Fraction]], seed: int | None, epochs: int
) -> None:
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        mixture = Mixture(parts, epoch, seed)
        seen.update(mixture.at(np.arange(len(mixture))).tolist())
    first = 0
    for samples, weight in parts:
        counts = [seen[number] for number in range(first, first + samples)]
        assert sum(counts) == int(epochs * weight * samples)
        assert not counts or max(counts) - min(counts) <= 1  # all are shown before one comes again
        first += samples
    assert first == sum(samples for samples, _ in parts) and max(seen, default=-1) < first


@given(parts=PARTS, epoch=st.integers(0, 3), data=st.data())
def test_any_position_can_be_asked_for(parts: list[tuple[int, Fraction]], epoch: int, data: st.DataObject) -> None:
    mixture = Mixture(parts, epoch, 1)
    if not len(mixture):
        return
    positions = np.array(data.draw(st.lists(st.integers(0, len(mixture) - 1), min_size=1)))
    assert mixture.at(positions).tolist() == mixture.at(np.arange(len(mixture)))[positions].tolist()


def test_sources_are_mixed_and_epochs_differ() -> None:
    parts = [(500, Fraction(1)), (500, Fraction(1))]
    orders = [Mixture(parts, epoch, 0).at(np.arange(1000)) for epoch in range(2)]
    assert (orders[0] != orders[1]).mean() > 0.9
    assert 30 < (orders[0][:100] < 500).sum() < 70
    assert Mixture(parts, 0, None).at(np.arange(1000)).tolist() == list(range(1000))


@given(records=st.integers(2, 500), share=st.floats(0, 0.9), seed=st.integers(0, 9))
def test_held_out_records(records: int, share: float, seed: int) -> None:
    wanted = max(1, round(records * share)) if share else 0
    if wanted >= records:
        with pytest.raises(ValueError, match="would be held out, expected at least one more"):
            held_out_records(records, share, seed)
        return
    held = held_out_records(records, share, seed)
    assert len(set(held.tolist())) == wanted and held.tolist() == sorted(held.tolist())
    assert held.tolist() == held_out_records(records, share, seed).tolist()
    assert held_out_records(records, 1, seed).shape == (1,)
