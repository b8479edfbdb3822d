"""How many steps a simulation runs: fewer where each is long, and an error where even the fewest would be too long."""

from __future__ import annotations

from roundpipe import _core

# Asynchronous steps until their pace is steady; the pace is measured over the second half.
_STEPS = 193
_FEWEST_STEPS = 17
# Together about a minute and a gigabyte: the check holds a time for each job and each microbatch.
_MOST_CELLS = 120_000_000
_MOST_CHUNKS = 6_000_000
_CHUNK_BYTES = 64_000_000


def steps_to_simulate(
    plan: _core.Plan, layers: list[_core.LayerCost], microbatches: int, *, repeated: bool, with_links: bool
) -> int:
    """One step, or enough `repeated` ones for the steady state. `plan` is the first of them.

    Raises:
        ValueError: one step is too long to be simulated.
    """
    fewest = _FEWEST_STEPS if repeated else 1
    cells = len(plan.jobs) * microbatches
    steps = _steps(cells, _MOST_CELLS // fewest, fewest, "jobs x microbatches", "take fewer microbatches")
    if with_links:
        moved = sum(2 * cost.weight_bytes + cost.gradient_bytes for cost in layers)
        moved += 2 * microbatches * sum(cost.activation_bytes for cost in layers)
        steps = min(
            steps, _steps(moved // _CHUNK_BYTES, _MOST_CHUNKS // fewest, fewest, "chunks of 64 MB", "leave out --links")
        )
    return steps if repeated else 1


def _steps(of_one_step: int, most: int, fewest: int, what: str, instead: str) -> int:
    """`most`: of one step, if only the `fewest` steps are simulated."""
    if of_one_step > most:
        raise ValueError(f"[schedule] a step has {of_one_step:,} {what}, expected at most {most:,}; {instead}")
    return min(_STEPS, fewest * most // max(1, of_one_step))
