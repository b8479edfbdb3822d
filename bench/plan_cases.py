"""How near does the planner come to the best plan, where layers are uneven and links are slow?

Sixty cases, in bench/plan_cases/ (make_cases.py there writes them): costs that differ by layer, every second layer
with experts, one giant layer, a heavy head, unequal devices; 1 to 16 devices, 1 to 64 microbatches, links of 12 and 25
GB/s, hosts of 50 GB/s, and optimizers with a rate. For each, every plan of a family is simulated: even and exact cuts
into every number of stages, the head whole or shared, steps that overlap or not. The table has the step of the
planner's plan, of the best plan of the family and of the greedy rule. Everything is predicted by the link simulator.
"""

from __future__ import annotations

import sys

from support.plan_family import cases, compare
from support.report import Report, parser


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("Plans of uneven models, and the best of a brute force", options.out)
    columns = ["case", "planner, ms", "best of the family, ms", "greedy, ms", "planner / best", "its plan"]
    rows, ratios = [], []
    for case in cases()[:: 20 if options.quick else 1]:
        result = compare(case)
        ratios.append((result.ratio, case.name))
        greedy = "does not fit" if result.greedy_ms is None else f"{result.greedy_ms:,.1f}"
        rows.append(
            [
                case.words,
                f"{result.chosen_ms:,.1f}",
                f"{result.best_ms:,.1f}",
                greedy,
                f"{result.ratio:.4f}",
                result.plan.replace("|", "/"),
            ]
        )
        if options.out is not None:
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    report.table(columns, rows)
    worst, name = max(ratios)
    report(f"Worst ratio: {worst:.4f} ({name}). Mean: {sum(ratio for ratio, _ in ratios) / len(ratios):.4f}.")
    report("")
    report.close()


if __name__ == "__main__":
    sys.exit(main())
