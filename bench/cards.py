"""How many tokens a second do cards train, by their data sheets?

Layer times follow from a model of the card: products, fused attention and element-wise bytes at the card's rates, and
launches (`roundpipe plan --card`). Plans, transfers and updates are those of the link simulator. The first table has
tokens a second, beside the published system's figures; everything in it is predicted, and stays so until a card says
otherwise. The second compares the layer times of the model with those that the published system gives. The third asks
what the published figures of 235B LoRA say about its machine: how fast weights moved through the host, if a step has
one microbatch more than there are devices. The fourth has the
same training on a base in fewer bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.published_models import MODELS
from support.report import Report, parser

from roundpipe.plan import cards
from roundpipe.plan.costs import CostSet, load
from roundpipe.plan.fit import costs_of_shapes
from roundpipe.plan.machine import Machine
from roundpipe.plan.options import PlanOptions
from roundpipe.plan.schedules import Request, choose
from roundpipe.plan.shapes import make_model, measure
from roundpipe.plan.within_memory import Planned, plan_within_memory

TOKENS = 8192
NAMES = ["Qwen3-1.7B", "Llama-3.1-8B", "Qwen3-32B", "Qwen3-235B-A22B"]
# What each machine has beside its cards; GB/s of the host's memory.
DESKTOP, SERVER = 60.0, 200.0
PUBLISHED = {
    1: {"Qwen3-1.7B": 8881, "Llama-3.1-8B": 3142, "Qwen3-32B": 740, "Qwen3-235B-A22B": 480},
    2: {"Qwen3-1.7B": 17026, "Llama-3.1-8B": 6259, "Qwen3-32B": 1476, "Qwen3-235B-A22B": 808},
    4: {"Qwen3-1.7B": 33178, "Llama-3.1-8B": 12278, "Qwen3-32B": 2897, "Qwen3-235B-A22B": 1281},
    8: {"Qwen3-1.7B": 65417, "Llama-3.1-8B": 24275, "Qwen3-32B": 5516, "Qwen3-235B-A22B": 1820},
}
LORA_LAYERS = "qwen3-235b-lora"
NARROW = 28.0  # GB/s of a host that explains the published figures of 235B


@dataclasses.dataclass(frozen=True)
class Rig:
    count: int
    card: str
    host_gb_per_s: float

    @property
    def words(self) -> str:
        return f"{self.count} x {self.card}"

    def machine(self) -> Machine:
        named = cards.named(self.card)
        link = named.link_gb_per_s
        rates = {"link_up_gb_per_s": link, "link_down_gb_per_s": link, "host_gb_per_s": self.host_gb_per_s}
        return Machine(self.words, [(1.0, named.memory_bytes)] * self.count, rates, card=named.card)


RIGS = [
    Rig(1, "rtx-4090", DESKTOP),
    Rig(8, "rtx-4090", SERVER),
    Rig(2, "rtx-3090", DESKTOP),
    Rig(4, "rtx-5090", SERVER),
    Rig(1, "h100", SERVER),
]
FAST: dict[str, Any] = {"arithmetic": "fast"}
FP16: dict[str, Any] = {"products": "fp16-accumulate"}
RECOMPUTED: dict[str, Any] = {"keep": 1}
KEPT: dict[str, Any] = {"keep": 1000}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": RECOMPUTED,
    "bf16, kept": KEPT,
    "bf16, fast": FAST | RECOMPUTED,
    "bf16, fast, kept": FAST | KEPT,
    "fp16": FP16 | RECOMPUTED,
    "fp16, fast": FP16 | FAST | RECOMPUTED,
    "fp16, fast, kept": FP16 | FAST | KEPT,
}


def cell(speed: float | None, limit: str, known: int | None) -> str:
    if speed is None:
        return "-"
    return f"{speed:,.0f} ({limit})" + ("" if known is None else f", {speed / known:.2f} x")


def planned_for(folder: Path, rig: Rig, name: str, values: dict[str, Any], seconds: float | None) -> Planned:
    machine = folder / f"{rig.words}.toml"
    machine.write_text(rig.machine().text())
    options = PlanOptions(
        model=str(folder / name),
        machine=machine,
        tokens=TOKENS,
        search_seconds=seconds,
        train="lora" if MODELS[name].lora else "full",
        **values,
    )
    return plan_within_memory(options)


def speed_of(planned: Planned) -> float | None:
    """Tokens a second; None: it does not fit."""
    if not planned.fits:
        return None
    step_ms = planned.fit.step_ms
    return planned.fit.request.microbatches * TOKENS / step_ms * 1000


def report_cards(report: Report, options: argparse.Namespace) -> None:
    report(
        f"Tokens a second, PREDICTED for every card, and what limits the step. {TOKENS:,} tokens a microbatch, one "
        "microbatch more than there are cards, asynchronous, AdamW with fp32 moments (235B: adapters of rank 16). The "
        f"memory of the host moves {DESKTOP:g} GB/s beside one RTX 4090 and two RTX 3090, {SERVER:g} GB/s beside the "
        "others. fp16 is with products that are added up in fp16, as the published system trains; fast is "
        '`arithmetic="fast"`, else "exact". All layers but the head are recomputed, unless as many as fit are kept. '
        "Published figures are measured, in fp16."
    )
    report("")
    report.header(["cards", "model", *WAYS, "published"])
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        for name in options.models:
            MODELS[name].config().save_pretrained(folder / name)
            for rig in RIGS[: 1 if options.quick else None]:
                known = PUBLISHED.get(rig.count, {}).get(name) if rig.card == "rtx-4090" else None
                seconds = 0.001 if options.quick else None
                found = [planned_for(folder, rig, name, way, seconds) for way in WAYS.values()]
                cells = [cell(speed_of(each), each.fit.choices[0].limit, known) for each in found]
                report.row([rig.words, name, *cells, "-" if known is None else f"{known:,}"])
    report("")


def report_layers(report: Report, options: argparse.Namespace) -> None:
    report(
        "Milliseconds of one layer and microbatch on an RTX 4090, by the model and as the published system gives them:"
    )
    report("")
    report.header(["model", "forward", "published", "ratio", "backward", "published", "ratio"])
    card = cards.named("rtx-4090").card.in_core("fp16-accumulate")
    for name in options.models:
        model = make_model(MODELS[name].config(), 16 if MODELS[name].lora else None)
        layer = costs_of_shapes(measure(model, TOKENS, name), card).layers[1]
        given = load(MODELS[name].preset).layers[0]
        cells = []
        for ours, theirs in ((layer.forward_ms, given.forward_ms), (layer.backward_ms, given.backward_ms)):
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        report.row([name, *cells])
    report("")


def lora_tokens_per_s(costs: CostSet, devices: int, host_gb_per_s: float) -> float:
    costs = dataclasses.replace(costs, rates=costs.rates | {"host_gb_per_s": host_gb_per_s})
    microbatches = devices + 1
    links = costs.cluster(devices, with_links=True)
    best = choose(Request(costs, costs.cluster(devices), microbatches, links=links))[0]
    return microbatches * TOKENS / best.step_ms * 1000


def report_lora(report: Report) -> None:
    costs = load(LORA_LAYERS)
    twice = 2 * sum(cost.weight_bytes for cost in costs.layers)
    report(
        "235B LoRA on RTX 4090, with the published layer times and one microbatch more than there are cards: the step "
        f"that the published figures imply; how fast {twice / 1e9:,.0f} GB of weights, each layer once in each "
        "direction, then went up over all links together; and what the link simulator predicts (links of 25 GB/s) with "
        "a host of 200 GB/s and with one that is as narrow as that."
    )
    report("")
    columns = ["cards", "published, tokens/s", "step, s", "weights up, GB/s", "host 200 GB/s", f"host {NARROW:g} GB/s"]
    rows = []
    for devices, figures in PUBLISHED.items():
        known = figures["Qwen3-235B-A22B"]
        step = (devices + 1) * TOKENS / known
        predicted = [lora_tokens_per_s(costs, devices, host) for host in (SERVER, NARROW)]
        shown = [f"{speed:,.0f} ({speed / known:.2f} x)" for speed in predicted]
        rows.append([str(devices), f"{known:,}", f"{step:.1f}", f"{twice / 1e9 / step:.1f}", *shown])
    report.table(columns, rows)


ENCODED: list[tuple[str, float, dict[str, Any]]] = [
    ("bf16", NARROW, {}),
    ("nf4", NARROW, {"quantise": "nf4"}),
    ("nf4-double", NARROW, {"quantise": "nf4-double"}),
    ("nf4-double in 128 GiB", NARROW, {"quantise": "nf4-double", "host_memory": "128GiB"}),
    ("bf16", SERVER, {}),
    ("nf4", SERVER, {"quantise": "nf4"}),
    ("nf4-double in 128 GiB", SERVER, {"quantise": "nf4-double", "host_memory": "128GiB"}),
]


def report_encoded(report: Report, options: argparse.Namespace) -> None:
    name = "Qwen3-235B-A22B"
    known = {count: figures[name] for count, figures in PUBLISHED.items()}
    report(
        f"PREDICTED: adapters of rank 16 on {name} with a base in fewer bits, on RTX 4090, {TOKENS:,} tokens a "
        "microbatch, one microbatch more than there are cards, or fewer where the host has no room: tokens a second; "
        "how many times as fast eight cards are as one; and with eight of them GB of the weights on the host, and of "
        f"the whole training. The published system, in 16 bits: {', '.join(f'{known[count]:,}' for count in known)} "
        f"({known[8] / known[1]:.1f} x)."
    )
    report("")
    counts = list(known)
    report.header(["base", "host, GB/s", *map(str, counts), "8 : 1", "weights, GB", "training, GB"])
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        MODELS[name].config().save_pretrained(folder / name)
        for base, host, values in ENCODED[: 1 if options.quick else None]:
            rigs = [Rig(count, "rtx-4090", host) for count in counts]
            seconds = 0.001 if options.quick else None
            found = [planned_for(folder, rig, name, RECOMPUTED | values, seconds) for rig in rigs]
            speeds = [speed_of(planned) for planned in found]
            cells = ["-" if speed is None else f"{speed:,.0f}" for speed in speeds]
            first, last = speeds[0], speeds[-1]
            times = "-" if first is None or last is None else f"{last / first:.1f}"
            sizes = [f"{size / 1e9:.1f}" for size in (found[-1].host.weights, found[-1].host.total)]
            report.row([base, f"{host:g}", *cells, times, *sizes])
    report("")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    options = arguments.parse_args()
    if options.quick:
        options.models = options.models[:1]
    report = Report("Tokens a second of cards, predicted from their data sheets", options.out)
    report_cards(report, options)
    report_layers(report, options)
    report_lora(report)
    report_encoded(report, options)
    report.close()


if __name__ == "__main__":
    sys.exit(main())
