"""How far does throughput grow with the devices until the links end it?

The presets on 1 to 16 devices, asynchronously, with the same batch on each number of devices. Every byte goes over the
links: each device has one, and all share the host's memory. A step moves the same weights and gradients on any number
of devices, while its compute shrinks, so at some number the links or the host's memory set the pace. The table says
where, and how many tokens a microbatch would need for 16 devices to be worth 90 % of 16. Layer times grow with the
tokens, which leaves out that attention grows faster. Everything is predicted by the link simulator.
"""

from __future__ import annotations

import copy
import dataclasses
import sys

from support.report import Report, parser

from roundpipe.planning.costs import PRESETS, CostSet, parse
from roundpipe.planning.schedules import Request, choose

DEVICES = [1, 2, 4, 8, 16]
MICROBATCHES = 32
PRESET_TOKENS = 8192
MEMORY = 24_000_000_000
WORTH = 0.9
LONGER = [2048, 4096, 8192, 16384, 32768]


@dataclasses.dataclass(frozen=True)
class Host:
    """Bandwidths in GB/s: of each link, each way, and of the host's memory under all of them."""

    words: str
    link_gb_per_s: float
    host_gb_per_s: float


HOSTS = [Host("server", 25, 200), Host("desktop", 12, 50)]


def costs_of(preset: str, tokens: int, host: Host) -> CostSet:
    document = copy.deepcopy(PRESETS[preset])
    share = tokens / PRESET_TOKENS
    for layer in [*document["layers"], document["head"]]:
        for name in ("forward_ms", "backward_ms"):
            layer[name] *= share
        for name in ("activation_bytes", "saved_bytes"):
            layer[name] = int(share * layer[name])
    del document["hop_latency_ms"], document["baseline_stages"]
    document |= {"link_up_gb_per_s": host.link_gb_per_s, "link_down_gb_per_s": host.link_gb_per_s}
    document["host_gb_per_s"] = host.host_gb_per_s
    return parse(document, preset)


@dataclasses.dataclass(frozen=True)
class Step:
    ms: float
    limit: str


def best_step(preset: str, tokens: int, host: Host, devices: int) -> Step | None:
    """None if a layer does not fit the devices."""
    costs = costs_of(preset, tokens, host)
    links = costs.cluster(devices, MEMORY, with_links=True)
    try:
        best = choose(Request(costs, costs.cluster(devices, MEMORY), MICROBATCHES, links=links))[0]
    except ValueError as error:
        if "bytes on a device" not in str(error):
            raise
        return None
    return Step(best.step_ms, best.limit)


def row(preset: str, tokens: int, host: Host, counts: list[int]) -> list[str]:
    steps = [best_step(preset, tokens, host, devices) for devices in counts]
    # What one device takes if it never waits: its links may be what limits it, too.
    alone = best_step(preset, tokens, dataclasses.replace(host, link_gb_per_s=0, host_gb_per_s=0), 1)
    name = f"{preset}, {tokens:,} tokens, {host.words}"
    if alone is None or None in steps:
        return [name, *["does not fit"] * len(counts), "", ""]
    worth = [alone.ms / (devices * step.ms) for devices, step in zip(counts, steps, strict=True) if step]
    print(name, *(f"{share:.3f}" for share in worth), sep=" | ", file=sys.stderr, flush=True)
    ends = [
        f"{devices}: {step.limit}"
        for devices, step, share in zip(counts, steps, worth, strict=True)
        if step and share < WORTH
    ]
    return [
        name,
        *(f"{devices * share:.2f}" for devices, share in zip(counts, worth, strict=True)),
        ends[0] if ends else "-",
        lift(preset, tokens, host, counts[-1]) if ends else "-",
    ]


def lift(preset: str, tokens: int, host: Host, devices: int) -> str:
    """The fewest tokens of a microbatch, of the lengths that are tried, with which the most devices pay."""
    for longer in LONGER:
        if longer <= tokens:
            continue
        alone = best_step(preset, longer, dataclasses.replace(host, link_gb_per_s=0, host_gb_per_s=0), 1)
        step = best_step(preset, longer, host, devices)
        if alone is None or step is None:
            return f"none: {longer:,} tokens do not fit"
        if alone.ms / (devices * step.ms) >= WORTH:
            return f"{longer:,}"
    return f"more than {LONGER[-1]:,}"


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("Scaling until the links end it, predicted", options.out)
    report(
        f"{MICROBATCHES} microbatches, asynchronous, devices of {MEMORY / 1e9:g} GB; "
        + "; ".join(
            f"{h.words}: links of {h.link_gb_per_s:g} GB/s each way, host {h.host_gb_per_s:g} GB/s" for h in HOSTS
        )
        + ". Numbers: the throughput in devices that never wait. Ends: the first number of devices that are worth less "
        f"than {100 * WORTH:g} % of that, and what limits them. Lifted by: tokens of a microbatch."
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
    report.close()


if __name__ == "__main__":
    main()
