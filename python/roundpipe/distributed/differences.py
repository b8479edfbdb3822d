"""Words for what the ranks have told each other: where it differs, and who has what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_MOST = 4  # differences that a message names; the others are counted


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def held(values: Iterable[str]) -> str:
    """Who has which value, given each rank's: `ranks 0 and 2 have X, rank 1 has Y`."""
    ranks_with: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_with.setdefault(value, []).append(rank)
    return ", ".join(
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in ranks_with.items()
    )


def differences(told: Sequence[Mapping[str, str]]) -> str:
    """What differs in what the ranks have told, in words; "" if nothing does.

    Args:
        told: for each rank, what it has, by the name of the thing. What a rank does not name, it has not got.
    """
    names = dict.fromkeys(name for each in told for name in each)
    found = [
        f"{name}: {held(values)}" for name in names if len(set(values := [each.get(name, "none") for each in told])) > 1
    ]
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more
