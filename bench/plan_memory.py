"""Does the planner find a slower plan where devices have more memory?

It should not, but memory is no rung of its ladder: a search with more memory considers other plans, and the placement
gives devices other jobs. This counts how often that happens in the cases of plan_cases.py: each with growing memory,
and with more memory on its first or its last device only. Where all devices of a case are alike, they start with little
memory, twice what the largest layer takes. Everything is predicted by the link simulator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from support.plan_family import Case, cases
from support.report import Report, parser

from roundpipe.plan.schedules import choose

FACTORS = (0.5, 0.75, 1.0, 2.0)
ONE_DEVICE = 1.5  # times the memory of one device
TIE = 0.001  # plans so near are equal


def memory_of(case: Case) -> list[int]:
    """The memory of each device to start from."""
    own = [memory for _, memory in case.request.costs.devices]
    if len(set(own)) > 1:
        return own
    largest = max(
        cost.weight_bytes + cost.gradient_bytes + cost.saved_bytes + 4 * cost.activation_bytes
        for cost in case.request.costs.layers
    )
    return [2 * largest] * len(own)


def step_ms(case: Case, memory: Sequence[float]) -> float | None:
    """The planner's step; None if no plan fits."""
    devices = [(speed, round(size)) for (speed, _), size in zip(case.request.costs.devices, memory, strict=True)]
    costs = dataclasses.replace(case.request.costs, devices=devices)
    links = costs.cluster(None, with_links=True)
    try:
        return choose(dataclasses.replace(case.request, costs=costs, links=links))[0].step_ms
    except ValueError:
        return None


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("Plans with more memory", options.out)
    compared, slower = 0, []
    rows = []
    for case in cases()[:: 20 if options.quick else 1]:
        memory = memory_of(case)
        least: float | None = None
        row, own = [], []

        def compare(ms: float | None, what: str, least_ms: float | None, name: str = case.name) -> str:
            nonlocal compared
            if ms is None:
                return "-"
            compared += least_ms is not None
            if least_ms is not None and ms > least_ms * (1 + TIE):
                slower.append((100 * (ms / least_ms - 1), f"{name}, {what}"))
                return f"**{ms:,.1f}**"
            return f"{ms:,.1f}"

        for factor in FACTORS:
            ms = step_ms(case, [factor * size for size in memory])
            row.append(compare(ms, f"{factor:g} x", least))
            own = [ms] if factor == 1 else own
            least = ms if least is None else min(least, ms or least)
        for device, word in ((0, "first"), (len(memory) - 1, "last")):
            more = [size * (ONE_DEVICE if number == device else 1) for number, size in enumerate(memory)]
            row.append(compare(step_ms(case, more), f"{word} device", own[0]) if len(memory) > 1 else "-")
        rows.append([case.words, *row])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    columns = ["case; step in ms, slower ones in bold", *(f"{factor:g} x" for factor in FACTORS)]
    report.table([*columns, f"first device {ONE_DEVICE:g} x", f"last device {ONE_DEVICE:g} x"], rows)
    worst = f"; most by {max(slower)[0]:.2f} % ({max(slower)[1]})" if slower else ""
    report(f"Of {compared} comparisons with less memory, {len(slower)} are slower by more than {100 * TIE:g} %{worst}.")
    over = sum(percent > 1 for percent, _ in slower)
    report(f"{over} of them by more than 1 %.")
    report("")
    report.close()


if __name__ == "__main__":
    sys.exit(main())
