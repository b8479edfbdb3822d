"""Several machines: does the exchange hide behind the devices' work, and is the simulator's step the measured one?

The first table: emulated layers, which take time on virtual devices and have gradients and weights of real bytes, on 1
to 4 nodes. Each node is a process in a network namespace of its own, whose link `tc` limits and, with --delay-ms, makes
late (root and iproute2 are needed; without them, all processes share the loopback without a limit, and only that row is
measured). Beside it, the step that `roundpipe plan --nodes` predicts, given the rate that gloo reaches on these
links: a loop of torch's collectives alone measures it, with the two kinds that a step has at the same time.
The second table: a real small model in a plain PyTorch loop with DistributedDataParallel over gloo, and in ours, on the
same rows, in turns. Losses have to agree.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from support import emulation, node_network
from support.node_network import Host
from support.ports import free_port
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import _core
from roundpipe.plan.compare import predict
from roundpipe.plan.costs import CostSet
from roundpipe.plan.nodes import Network, predict_nodes
from roundpipe.plan.schedules import Request

LINKS = emulation.Links(gb_per_s=2.0, host_gb_per_s=0.0)
WARM_UP = 3
LATENCY_MS = 0.5  # of a collective between processes of one machine


@dataclasses.dataclass(frozen=True)
class Setting:
    """The emulated training of a node."""

    layers: int = 8
    forward_ms: float = 20.0
    layer_mb: float = 4.0
    devices: int = 2
    microbatches: int = 4
    steps: int = 8

    def request(self) -> Request:
        size = round(self.layer_mb * 1e6)
        times = {"forward_ms": self.forward_ms, "backward_ms": 2 * self.forward_ms}
        cost = _core.LayerCost(**times, weight_bytes=size, gradient_bytes=size)
        rates = {"link_up_gb_per_s": LINKS.gb_per_s, "link_down_gb_per_s": LINKS.gb_per_s}
        costs = CostSet("emulated", [cost] * self.layers, rates=rates)
        links = costs.cluster(self.devices, with_links=True)
        return emulation.scaled(Request(costs, links, self.microbatches, links=links), 1.0)


# -- one node ----------------------------------------------------------------------------------------------------------


def emulated_step_ms(setting: Setting) -> float:
    request = setting.request()
    prediction = predict("roundpipe", request)
    updates = [0.01] * setting.layers
    taken = emulation.emulate(
        prediction, request, setting.steps, lambda *_: None, updates, links=LINKS, warm_up=WARM_UP
    )
    return taken.step_ms


def reached_gb_per_s(setting: Setting) -> float:
    """What each node sends in a second by torch's collectives alone, with blocks of the layers' size."""
    nodes, size = torch.distributed.get_world_size(), round(setting.layer_mb * 1e6)
    shard = size // nodes
    groups = [torch.distributed.new_group(backend="gloo") for _ in range(2)]

    def gradients(blocks: int) -> None:
        sent, received = torch.ones(shard * nodes, dtype=torch.uint8), torch.empty(shard * nodes, dtype=torch.uint8)
        for _ in range(blocks):
            torch.distributed.all_to_all_single(received, sent, group=groups[0])

    def weights(blocks: int) -> None:
        own, all_of_them = torch.ones(shard, dtype=torch.uint8), torch.empty(shard * nodes, dtype=torch.uint8)
        for _ in range(blocks):
            torch.distributed.all_gather_into_tensor(all_of_them, own, group=groups[1])

    for blocks in (1, setting.layers):  # the first to warm up
        torch.distributed.barrier()
        began = time.perf_counter()
        beside = threading.Thread(target=gradients, args=(blocks,))
        beside.start()
        weights(blocks)
        beside.join()
        torch.distributed.barrier()
        taken_s = time.perf_counter() - began
    return 2 * setting.layers * shard * (nodes - 1) / taken_s / 1e9


def small_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(width, 8))


def batches(rank: int, rows: int, width: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(rows, width, generator=generator), torch.randn(rows, 8, generator=generator)


class Distributed:
    """A plain loop with DistributedDataParallel."""

    def __init__(self, width: int) -> None:
        self.model = nn.parallel.DistributedDataParallel(small_model(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(self.model(rows), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Ours:
    """The same by RoundPipe."""

    def __init__(self, width: int) -> None:
        roundpipe.devices("virtual:1")
        config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
        self.model = roundpipe.RoundPipe(small_model(width), model_run_config=config)
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-3)

    def step(self, rows: torch.Tensor, labels: torch.Tensor) -> float:
        loss = self.model.forward_backward((rows,), label=labels, loss_fn=nn.functional.mse_loss)
        self.model.step(self.optimizer, False)
        return float(loss)


def real_steps(width: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each step, and its losses: both in turns on the same batches."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    contestants = {"ddp": Distributed(width), "roundpipe": Ours(width)}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    for step, (batch, labels) in enumerate(batches(rank, rows, width, steps + WARM_UP)):
        for name in sorted(contestants, reverse=step % 2 == 1):
            torch.distributed.barrier()
            began = time.perf_counter()
            losses[name].append(contestants[name].step(batch, labels))
            if step >= WARM_UP:
                taken[name].append(1000 * (time.perf_counter() - began))
    if not torch.allclose(*(torch.tensor(losses[name]) for name in contestants), rtol=1e-4):
        raise RuntimeError(f"the losses differ: {losses}")
    return taken


def node(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if asked["nodes"] > 1 or asked["what"] == "real":
        torch.distributed.init_process_group("gloo")
    if asked["what"] == "emulated":
        result: Any = emulated_step_ms(Setting(**asked["setting"]))
    elif asked["what"] == "rate":
        result = reached_gb_per_s(Setting(**asked["setting"]))
    else:
        result = real_steps(asked["width"], asked["rows"], asked["steps"])
    print("RESULT " + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


# -- all of them -------------------------------------------------------------------------------------------------------


def run_nodes(asked: dict[str, Any], places: Sequence[Host] | None = None) -> list[Any]:
    """What each node printed; places: None for this machine's loopback."""
    address, interface = (places[0].address, "eth0") if places else ("127.0.0.1", "lo")
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": interface}
    running = []
    for rank in range(asked["nodes"]):
        own = {"RANK": str(rank), "WORLD_SIZE": str(asked["nodes"]), "OMP_NUM_THREADS": "1"}
        prefix = places[rank].prefix if places else []
        command = [*prefix, sys.executable, __file__, "--node", json.dumps(asked)]
        running.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=subprocess.PIPE, text=True))
    results = []
    for process in running:
        out, _ = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if process.returncode or not lines:
            raise RuntimeError(f"a node ended with {process.returncode}: {out[-2000:]}")
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    return results


@dataclasses.dataclass(frozen=True)
class Link:
    """Of each node."""

    megabits: float
    delay_ms: float

    def __str__(self) -> str:
        return f"{self.megabits:g} Mb/s" + (f", {self.delay_ms:g} ms late" if self.delay_ms else "")


def compare_emulated(report: Report, setting: Setting, counts: Sequence[int], links: Sequence[Link | None]) -> None:
    request = setting.request()
    choice = predict("roundpipe", request).choice
    if choice is None:
        raise RuntimeError("the planner found no plan")
    asked = {"what": "emulated", "setting": dataclasses.asdict(setting)}
    alone = run_nodes({**asked, "nodes": 1})[0]
    rows = [["1", "-", "-", f"{alone:,.1f}", "-", "-", "1.00", "-"]]
    for link in links:
        for nodes in counts:
            hosts = node_network.hosts(nodes, link.megabits, link.delay_ms) if link else contextlib.nullcontext()
            with hosts as places:
                rates = [run_nodes({**asked, "what": "rate", "nodes": nodes}, places)] if link else []
                measured = statistics.median(run_nodes({**asked, "nodes": nodes}, places))
                rates += [run_nodes({**asked, "what": "rate", "nodes": nodes}, places)] if link else []
            # gloo's collectives over loopback cost no network, but the cores' time.
            reached = statistics.fmean(rate for each in rates for rate in each) if link else 0.0
            network = Network(reached, LATENCY_MS + (link.delay_ms if link else 0.0))
            predicted = predict_nodes([nodes], request, choice, network, clip=False, at_once=False)[0]
            speedup = f"{nodes * alone / measured:.2f}"
            ratio = f"{measured / predicted.step_ms:.3f}"
            shown = [
                str(nodes),
                str(link or "no limit"),
                f"{reached * 8e3:,.0f} Mb/s" if link else "-",
                f"{measured:,.1f}",
                f"{predicted.step_ms:,.1f}",
                ratio,
                speedup,
            ]
            rows.append([*shown, predicted.limited_by])
    header = [
        "nodes",
        "network of each",
        "reached",
        "step ms",
        "predicted ms",
        "measured / predicted",
        "x one node",
        "limited by",
    ]
    report.table(header, rows)


def compare_real(report: Report, counts: Sequence[int], width: int, steps: int) -> None:
    rows = []
    for nodes in counts:
        asked = {"what": "real", "nodes": nodes, "width": width, "rows": 64, "steps": steps}
        taken = run_nodes(asked)[0]
        medians = {name: statistics.median(times) for name, times in taken.items()}
        ratio = medians["ddp"] / medians["roundpipe"]
        rows.append([str(nodes), f"{medians['ddp']:,.1f}", f"{medians['roundpipe']:,.1f}", f"{ratio:.2f}"])
    report.table(["nodes", "DDP, gloo, ms a step", "RoundPipe, ms a step", "DDP / RoundPipe"], rows)


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        node(json.loads(sys.argv[2]))
        return
    options = parser(__doc__)
    options.add_argument("--nodes", default="2,4", help="numbers of nodes")
    options.add_argument("--megabits", default="2000,400,200,100", help="rates of each node's network, in Mb/s")
    late = "milliseconds by which what a node sends is late, on these networks; needs netem in the kernel"
    options.add_argument("--delay-ms", type=float, default=0.0, help=late)
    options.add_argument("--width", type=int, default=768, help="of the real model")
    chosen: argparse.Namespace = options.parse_args()
    counts = [int(count) for count in chosen.nodes.split(",")]
    rates = [] if chosen.quick else chosen.megabits.split(",")
    obstacle = node_network.obstacle(chosen.delay_ms) if rates else ""
    if chosen.delay_ms and obstacle:
        options.error(f"--delay-ms {chosen.delay_ms:g}: {obstacle}")
    links = [] if obstacle else [Link(float(rate), chosen.delay_ms) for rate in rates]
    setting = Setting(steps=2, layers=3, forward_ms=5.0) if chosen.quick else Setting()
    report = Report("Several machines", chosen.out)
    report("## Emulated layers: the step, and what `roundpipe plan --nodes` says")
    report("")
    report(
        f"{setting.layers} layers of {setting.forward_ms:g} ms forward and {setting.layer_mb:g} MB of weights and of "
        f"gradients, {setting.devices} devices and {setting.microbatches} microbatches on each node, asynchronous."
    )
    report("")
    compare_emulated(report, setting, counts[:1] if chosen.quick else counts, [None, *links])
    report("## A real model: DistributedDataParallel and ours, on one machine's cores")
    report("")
    compare_real(report, counts[:1], 256 if chosen.quick else chosen.width, 4 if chosen.quick else 15)
    report.close()


if __name__ == "__main__":
    main()
