"""Orders as pure functions, the same everywhere."""

from __future__ import annotations

import numpy as np

from roundpipe import _core
from roundpipe.data.order import InOrder, fingerprint, shuffle

ORDER = {12: [7, 4, 0, 11, 2, 1, 6, 8, 9, 3, 10, 5], 10**6: [352006, 676274, 484006, 806178, 949032]}


def test_orders_stay_what_they_are() -> None:
    # Runs that go on after an update rely on these numbers.
    for count, numbers in ORDER.items():
        assert shuffle(count, 0, 0).at(np.arange(len(numbers))).tolist() == numbers
        assert _core.epoch_order(count, "0", 0).at(np.arange(len(numbers))).tolist() == numbers
    assert len(shuffle(12, "held out", 0)) == 12
    positions = np.array([[3, 1]])
    assert (shuffle(12, "held out", 0).at(positions) == _core.held_out_order(12, "0").at(positions)).all()
    assert InOrder(3).at(np.arange(3)).tolist() == [0, 1, 2]


def test_fingerprints_differ() -> None:
    assert len({fingerprint(np.array(numbers)) for numbers in ([], [0], [1], [0, 1], [1, 0])}) == 5
