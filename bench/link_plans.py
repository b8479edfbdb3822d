"""What is it worth that the planner knows what its plans move over the links?

Presets, with layer times and values scaled to shorter microbatches, on machines whose links or host memory are nearly
as slow as their compute. For each, the table has the step of a machine without links, the plan that a search without
bytes chooses and the one that the planner chooses. The link simulator times both, by a different number of steps than
the planner. Everything is predicted; the unit tests compare the simulator with a slower one.
"""

from __future__ import annotations

import dataclasses
import sys

from support.presets import at_length
from support.report import Report, parser

from roundpipe import _core
from roundpipe.plan.costs import CostSet
from roundpipe.plan.schedules import Request, choose, placed

MEMORY = 24_000_000_000


@dataclasses.dataclass
class Case:
    """A preset, the tokens of a microbatch, and the machine."""

    preset: str
    tokens: int
    devices: int
    microbatches: int
    host_gb_per_s: float = 200.0

    def costs(self) -> CostSet:
        return at_length(self.preset, self.tokens, host_gb_per_s=self.host_gb_per_s)

    @property
    def name(self) -> str:
        words = f"{self.preset}, {self.devices} devices, {self.microbatches} microbatches of {self.tokens:,} tokens"
        return f"{words}, host {self.host_gb_per_s:g} GB/s"


CASES = [
    Case("qwen3-32b", 2048, 4, 8, 50),
    Case("gpt-oss-20b", 8192, 4, 5, 50),
    Case("llama3.1-8b", 2048, 2, 3),
    Case("llama3.1-8b", 2048, 1, 2),
    Case("qwen3-1.7b", 2048, 8, 16),
    Case("qwen3-235b-lora", 2048, 8, 16),
]


def measure(case: Case, steps: int) -> list[str]:
    costs = case.costs()
    request = Request(
        costs=costs,
        cluster=costs.cluster(case.devices, MEMORY),
        microbatches=case.microbatches,
        gradient_groups=0,
        through_engine=True,
    )
    linked = dataclasses.replace(request, links=costs.cluster(case.devices, MEMORY, with_links=True))
    blind, seeing = choose(request)[0], choose(linked)[0]

    def true_ms(choice: _core.PlanChoice) -> float:
        plans = placed(choice, linked, steps)
        assert linked.links is not None
        return _core.simulate_links(plans, costs.layers, linked.links).timeline.steady_step_ms

    limit, without, known = seeing.work_ms / case.devices, true_ms(blind), true_ms(seeing)
    words = f"{seeing.cut}; limited by {seeing.limit}".replace("|", "/")  # a table has bars of its own
    return [case.name, f"{limit:,.0f}", f"{without:,.0f}", f"{known:,.0f}", f"{known / limit:.3f}", words]


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("Plans that know bytes: the simulated step with and without", options.out)
    columns = ["case", "compute alone, ms", "bytes unknown, ms", "planner, ms", "planner / compute", "its plan"]
    cases, steps = (CASES[2:4], 13) if options.quick else (CASES, 97)
    report.table(columns, [measure(case, steps) for case in cases])
    report.close()


if __name__ == "__main__":
    sys.exit(main())
