"""How many microbatches a step should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundpipe import _core

# More microbatches fill the devices better, and each of them less well: the fewest win among those whose predicted step
# is at most this much longer than the shortest.
_TOLERANCE = 0.02
_MOST_FOR_EACH_DEVICE = 8


@dataclass(frozen=True)
class Microbatches:
    """A chosen number of microbatches, and the reason, worded for the user."""

    count: int
    reason: str


def choose(pipeline: _core.Pipeline, most: int, groups: int, fits: Callable[[int], bool]) -> Microbatches:
    """Chooses the number of microbatches of a model's steps.

    The predicted step follows from the layers' costs, measured or estimated; a microbatch of half the rows is taken to
    cost half as much. Estimated costs say nothing of transfers, which few microbatches cannot hide: then the number is
    at least the default. Deterministic.

    Args:
        most: as many as the batch allows.
        groups: of gradients, see `RoundPipeRunConfig`.
        fits: whether a step with so many microbatches fits in memory.
    """
    devices = len(_core.Engine.current())
    steps = pipeline.measured_steps()
    measured = pipeline.knows_costs() and len(steps) > 0
    now = steps[-1].microbatches if measured else 1
    least = 1 if measured else min(most, devices + 1)
    numbers = _candidates(least, min(most, _MOST_FOR_EACH_DEVICE * devices))
    predicted_ms = {number: pipeline.predicted_ms(number, groups, now / number) for number in numbers}
    best_ms = min(predicted_ms.values())
    wanted = next(number for number in numbers if predicted_ms[number] <= (1 + _TOLERANCE) * best_ms)
    # Smaller microbatches may fit where larger ones do not, even if the devices do not need them.
    larger = _candidates(wanted, most)
    count = next((number for number in larger if fits(number)), larger[-1])
    reason = f"{'measured' if measured else 'estimated'} costs, {devices} device{'s' if devices > 1 else ''}: "
    reason += f"more would shorten the predicted step by less than {_TOLERANCE:.0%}"
    if count != wanted:
        reason += f" from {wanted} on, but fewer than {count} do not fit in memory"
    elif wanted == most:
        reason = f"{reason.partition(':')[0]}: as many as the batch allows"
    return Microbatches(count, reason)


def _candidates(least: int, most: int) -> list[int]:
    """Every number up to 16, then steps of about an eighth."""
    numbers = [least]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + max(1, numbers[-1] // 8)))
    return numbers
