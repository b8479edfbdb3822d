"""Orders of samples as pure functions of a seed and a position: nothing is held, and a resume needs a number only."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from roundpipe import _core

Numbers = npt.NDArray[np.int64]


class InOrder:
    """The numbers from 0 to below `count`, as they are."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def at(self, positions: Numbers) -> Numbers:
        """The numbers at these positions."""
        return positions


def shuffle(count: int, *key: int | str) -> _core.Shuffle:
    """A permutation of the numbers from 0 to below `count`, of which any part can be asked for. The same count and key
    give the same one on every machine.

    Args:
        count: how many numbers there are.
        *key: numbers or texts that choose the permutation, for example a seed and an epoch.
    """
    return _core.Shuffle(count, repr(key))


def fingerprint(numbers: Numbers) -> str:
    """A short text that differs if any number does."""
    return hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=8).hexdigest()
