"""How `roundpipe plan` prints sizes."""

from __future__ import annotations

import pytest

from roundpipe.plan.performance.sizes import sized, sized_of


@pytest.mark.parametrize(
    ("size", "there", "said"),
    [
        (8_220_000_000, 24_000_000_000, "8.22 of 24.00 GB"),
        (1_200_000, 24_000_000_000, "1.20 MB of 24.00 GB"),
        (120_000_000, 99_000_000, "0.12 GB of 99.00 MB"),
        (4_000, 9_000, "4.00 of 9.00 kB"),
        (0, 24_000_000_000, "0.00 kB of 24.00 GB"),
    ],
)
def test_a_size_is_more_than_zeros(size: int, there: int, said: str) -> None:
    assert sized_of(size, there) == said
    assert said.startswith(sized(size).split(" ")[0])
