"""Orders of samples as pure functions of a seed and a position: nothing is held, and a resume needs a number only."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_ROUNDS = 6
_SMALL = 1 << 10  # up to here, a permutation is made at once, from images among far more numbers
_SMALL_HALF_BITS = 16


class InOrder:
    """The numbers from 0 to below `count`, as they are."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def at(self, positions: Numbers) -> Numbers:
        """The numbers at these positions."""
        return positions


class Shuffle:
    """A permutation of the numbers from 0 to below `count`, of which any part can be asked for.

    It is a Feistel network over the next power of four; what falls outside of the count is sent through again. Small
    counts are sorted by their images instead, since few bits shuffle badly. The same count and key give the same
    permutation on every machine.

    Args:
        count: how many numbers there are.
        *key: numbers or texts that choose the permutation, for example a seed and an epoch.
    """

    def __init__(self, count: int, *key: int | str) -> None:
        self._count = count
        self._half = _SMALL_HALF_BITS if count <= _SMALL else ((count - 1).bit_length() + 1) // 2
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._whole = np.argsort(self._once(np.arange(count, dtype=np.uint64))) if count <= _SMALL else None

    def __len__(self) -> int:
        return self._count

    def at(self, positions: Numbers) -> Numbers:
        """The numbers at these positions, each from 0 to below the count."""
        if self._whole is not None:
            return self._whole[positions]
        found = self._once(positions.astype(np.uint64))
        while (outside := found >= self._count).any():
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << half) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer: every bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def fingerprint(numbers: Numbers) -> str:
    """A short text that differs if any number does."""
    return hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=8).hexdigest()
