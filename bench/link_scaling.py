"""How far does throughput grow with the devices until the links end it?

The presets on 1 to 16 devices, asynchronously, with the same batch on each number of devices. Every byte goes over the
links: each device has one, and all share the host's memory. A step moves the same weights and gradients on any number
of devices, while its compute shrinks, so at some number the links or the host's memory set the pace. The table says
where, and how many tokens a microbatch, or how many microbatches a batch would need for 16 devices to be worth 90 % of
16. The updates of AdamW move bytes of the same memory. A second table has small steps on a desktop with one card, which
these updates limit, and what helps. Layer times grow with the tokens, which leaves out that attention grows faster.
Everything is predicted by the link simulator.
"""

from __future__ import annotations

import dataclasses
import sys

from support.presets import at_length
from support.report import Report, parser

from roundpipe.model.memory.budget import UpdateRule
from roundpipe.plan.costs import PRESETS, CostSet
from roundpipe.plan.schedules import Mode, Request, choose

DEVICES = [1, 2, 4, 8, 16]
MICROBATCHES = 32
MEMORY = 24_000_000_000
WORTH = 0.9
LONGER = [2048, 4096, 8192, 16384, 32768]
LARGER = [64, 128, 256]


@dataclasses.dataclass(frozen=True)
class Host:
    """Bandwidths in GB/s: of each link, each way, and of the host's memory under all of them."""

    words: str
    link_gb_per_s: float
    host_gb_per_s: float


HOSTS = [Host("server", 25, 200), Host("desktop", 12, 50)]
ADAMW = UpdateRule("adamw")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train on one card."""

    words: str
    tokens: int = 2048
    microbatches: int = 4
    moments: str = "fp32"
    mode: Mode = "async"


SMALL_HOST = Host("desktop", 25, 60)
WAYS = [
    Way("as it is"),
    Way("synchronous", mode="sync"),
    Way("8-bit moments", moments="8bit"),
    Way("an update every second batch", microbatches=8),
    Way("an update every fourth batch", microbatches=16),
    Way("8-bit moments, every second batch", microbatches=8, moments="8bit"),
    Way("microbatches of 8,192 tokens", tokens=8192),
]


def costs_of(preset: str, tokens: int, host: Host) -> CostSet:
    link = host.link_gb_per_s
    return at_length(preset, tokens, link_up_gb_per_s=link, link_down_gb_per_s=link, host_gb_per_s=host.host_gb_per_s)


@dataclasses.dataclass(frozen=True)
class Step:
    ms: float
    limit: str


def best_step(
    preset: str,
    tokens: int,
    host: Host,
    devices: int,
    microbatches: int = MICROBATCHES,
    rule: UpdateRule = ADAMW,
    mode: Mode = "async",
) -> Step | None:
    """None if a layer does not fit the devices."""
    costs = costs_of(preset, tokens, host)
    request = Request(
        costs,
        costs.cluster(devices, MEMORY),
        microbatches,
        mode=mode,
        links=costs.cluster(devices, MEMORY, with_links=True),
        update_traffic=rule.traffic(),
    )
    try:
        best = choose(request)[0]
    except ValueError as error:
        if "bytes on a device" not in str(error):
            raise
        return None
    return Step(best.step_ms, best.limit)


def worth(preset: str, tokens: int, host: Host, devices: int, microbatches: int = MICROBATCHES) -> float | None:
    """The throughput over that of as many devices that never wait; None if a layer does not fit."""
    # One device that never waits, also not for its own links.
    free = dataclasses.replace(host, link_gb_per_s=0, host_gb_per_s=0)
    alone = best_step(preset, tokens, free, 1, microbatches)
    step = best_step(preset, tokens, host, devices, microbatches)
    return None if alone is None or step is None else alone.ms / (devices * step.ms)


def row(preset: str, tokens: int, host: Host, counts: list[int]) -> list[str]:
    name = f"{preset}, {tokens:,} tokens, {host.words}"
    shares = [worth(preset, tokens, host, devices) for devices in counts]
    cells = [
        "does not fit" if share is None else f"{devices * share:.2f}"
        for devices, share in zip(counts, shares, strict=True)
    ]
    print(name, *cells, sep=" | ", file=sys.stderr, flush=True)
    ends = [devices for devices, share in zip(counts, shares, strict=True) if share is not None and share < WORTH]
    if not ends:
        return [name, *cells, "-", "-"]
    step = best_step(preset, tokens, host, ends[0])
    assert step is not None
    return [name, *cells, f"{ends[0]}: {step.limit}", lift(preset, tokens, host, counts[-1])]


def lift(preset: str, tokens: int, host: Host, devices: int) -> str:
    """The fewest tokens of a microbatch, or microbatches, of those that are tried, with which the most devices pay."""

    def pays(longer: int, larger: int) -> bool:
        share = worth(preset, longer, host, devices, larger)
        return share is not None and share >= WORTH

    longer = next((longer for longer in LONGER if longer > tokens and pays(longer, MICROBATCHES)), None)
    larger = next((larger for larger in LARGER if pays(tokens, larger)), None)
    ways = [f"{longer:,} tokens" if longer else "", f"{larger} microbatches" if larger else ""]
    return " or ".join(way for way in ways if way) or f"neither {LONGER[-1]:,} tokens nor {LARGER[-1]} microbatches"


def small_step(preset: str, way: Way) -> list[str]:
    costs = costs_of(preset, way.tokens, SMALL_HOST).layers
    rule = UpdateRule("adamw", way.moments)
    step = best_step(preset, way.tokens, SMALL_HOST, 1, way.microbatches, rule, way.mode)
    updates = sum(cost.updated_bytes for cost in costs) * rule.traffic() / SMALL_HOST.host_gb_per_s / 1e9
    # One device visits each layer twice, of which it keeps the head's values.
    work = sum(2 * cost.forward_ms + cost.backward_ms for cost in costs) - costs[-1].forward_ms
    work *= way.microbatches / 1000
    name = f"{preset}, {way.words}"
    if step is None:
        return [name, f"{work:.2f}", f"{updates:.2f}", "does not fit", "-", "-"]
    share = f"{100 * work / (step.ms / 1000):.0f}"
    return [name, f"{work:.2f}", f"{updates:.2f}", f"{step.ms / 1000:.2f}", share, step.limit]


def report_small_steps(report: Report, quick: bool) -> None:
    report(
        f"Small steps on one card: {WAYS[0].microbatches} microbatches of {WAYS[0].tokens:,} tokens, links of "
        f"{SMALL_HOST.link_gb_per_s:g} GB/s each way, host {SMALL_HOST.host_gb_per_s:g} GB/s. Updates: the time of the "
        "optimizer's bytes alone. Compute: the device's share of the step, in percent."
    )
    report("")
    columns = ["case", "compute, s", "updates, s", "step, s", "compute, %", "limited by"]
    trained = [preset for preset in PRESETS if not preset.endswith("lora")]
    rows = [small_step(preset, way) for preset in trained[: 1 if quick else None] for way in WAYS]
    report.table(columns, rows)


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("Scaling until the links end it, predicted", options.out)
    report(
        f"{MICROBATCHES} microbatches, asynchronous, devices of {MEMORY / 1e9:g} GB; "
        + "; ".join(
            f"{h.words}: links of {h.link_gb_per_s:g} GB/s each way, host {h.host_gb_per_s:g} GB/s" for h in HOSTS
        )
        + ". Numbers: the throughput in devices that never wait. Ends: the first number of devices that are worth less "
        f"than {100 * WORTH:g} % of that, and what limits them. Lifted by: what makes the most devices worth more."
    )
    report("")
    counts = DEVICES[:2] if options.quick else DEVICES
    rows = [
        row(preset, tokens, host, counts)
        for preset in list(PRESETS)[: 1 if options.quick else None]
        for host in HOSTS
        for tokens in (8192, 2048)
    ]
    report.table(["case", *(f"{count} devices" for count in counts), "ends at", "lifted by"], rows)
    report_small_steps(report, options.quick)
    report.close()


if __name__ == "__main__":
    main()
