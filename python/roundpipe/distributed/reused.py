"""Groups that models use one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Reused(Generic[T]):
    """Things of one kind that are made of groups of one process group. Calling thread only.

    One is used again once its user is gone on all ranks: torch keeps every group, with its connections and threads,
    until the whole package is shut down.
    """

    def __init__(self) -> None:
        self._made: dict[str, T] = {}  # by names that are the same on all ranks
        self._free: set[str] = set()

    def free(self) -> list[str]:
        """The names of those whose users are gone on this rank."""
        return sorted(self._free)

    def take(self, user: object, free: Iterable[Iterable[str]], make: Callable[[], tuple[str, T]]) -> T:
        """One that `user` has for as long as it lives. Collective.

        Args:
            user: weakly referenced.
            free: what `free` has returned on every rank.
            make: makes another one, with its name. Collective.
        """
        everywhere = set.intersection(*map(set, free))
        if everywhere:
            name = min(everywhere)
            self._free.remove(name)
        else:
            name, made = make()
            self._made[name] = made
        weakref.finalize(user, self._free.add, name).atexit = False
        return self._made[name]
