"""Orders as pure functions: every number once, any part of them at a time, the same everywhere."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.data.order import InOrder, Shuffle, fingerprint

ORDER = {12: [7, 4, 0, 11, 2, 1, 6, 8, 9, 3, 10, 5], 10**6: [352006, 676274, 484006, 806178, 949032]}


@given(count=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 5))
def test_every_number_is_there_once(count: int, seed: int, epoch: int) -> None:
    assert np.sort(Shuffle(count, seed, epoch).at(np.arange(count))).tolist() == list(range(count))


@given(count=st.integers(1, 1 << 40), seed=st.integers(0, 9), data=st.data())
def test_any_part_can_be_asked_for(count: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20)))
    shuffle = Shuffle(count, seed)
    together = shuffle.at(positions)
    assert together.tolist() == [int(shuffle.at(np.array([position]))[0]) for position in positions]
    assert (together >= 0).all() and (together < count).all()


def test_orders_stay_what_they_are() -> None:
    # Runs that go on after an update rely on these numbers.
    for count, numbers in ORDER.items():
        assert Shuffle(count, 0, 0).at(np.arange(len(numbers))).tolist() == numbers
    assert InOrder(3).at(np.arange(3)).tolist() == [0, 1, 2]


def test_each_number_is_everywhere_as_often() -> None:
    count, draws = 6, 3000
    places = np.zeros((count, count))
    for seed in range(draws):
        places[np.arange(count), Shuffle(count, seed).at(np.arange(count))] += 1
    chi_squared = ((places - draws / count) ** 2 / (draws / count)).sum()
    assert chi_squared < 60  # 25 degrees of freedom: 1 in 10,000 is above 59


def test_fingerprints_differ() -> None:
    assert len({fingerprint(np.array(numbers)) for numbers in ([], [0], [1], [0, 1], [1, 0])}) == 5
