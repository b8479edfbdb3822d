"""How fast is one AdamW step on the host, when gradients arrive in bf16 and weights leave in bf16?

Ours makes one pass over memory: it reads the bf16 gradient, the weight (bf16 and the 16 bits that make it fp32) and
the moments, and writes the new weight over the gradient. The others are fp32 optimizers: the gradient is cast before
the step, the weight after it, the gradient is zeroed for the next sum, and all that counts.

All contestants of a size take one step in turn, in rounds, each round beginning with another one; every turn finds
caches full of something else. They get the same gradients, and after the first steps their weights are compared. Other
packages run in processes of their own, from a folder that only they see:

    pip install --target A --no-deps roundpipe==0.1.1 py-cpuinfo ninja
    pip install --target B --no-deps deepspeed einops hjson msgpack ninja packaging psutil py-cpuinfo tqdm
    pip install --target C --no-deps torchao
    pip install --target D --no-deps bitsandbytes
    python bench/optimizer.py --published A --deepspeed B --torchao C --bitsandbytes D

The first three compile their kernels when they first run (a C++ compiler is needed), the first two into the same
folder. Of torchao and bitsandbytes, it is AdamW with moments of 8 bits.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from support import adamw
from support.adamw import HYPER, Gradients, Times, WithCasts
from support.report import Report, parser

from roundpipe import _core
from roundpipe.model.memory.host import free_host_bytes

OURS, OURS_8BIT, TORCH = "ours", "ours, 8-bit", "torch fused"
SHORT, SHORT_8BIT = "ours, 24-bit masters", "ours, 24-bit masters, 8-bit"
FORMATS = {
    name: _core.StateFormat(moments, masters)
    for name, moments, masters in [
        (OURS, _core.MomentFormat.FLOAT32, _core.MasterFormat.FLOAT32),
        (OURS_8BIT, _core.MomentFormat.BLOCKWISE_8BIT, _core.MasterFormat.FLOAT32),
        (SHORT, _core.MomentFormat.FLOAT32, _core.MasterFormat.BITS_24),
        (SHORT_8BIT, _core.MomentFormat.BLOCKWISE_8BIT, _core.MasterFormat.BITS_24),
    ]
}
PEERS = {
    "published": "roundpipe (published)",
    "deepspeed": "DeepSpeed",
    "torchao": "torchao, 8-bit",
    "bitsandbytes": "bitsandbytes, 8-bit",
}
IN_8_BITS = (OURS_8BIT, SHORT_8BIT, PEERS["torchao"], PEERS["bitsandbytes"])
COPY, MEMCPY, SCALE = "copy", "memcpy", "scale"  # not contestants, but run in the same turns
# Read and written, a parameter.
OURS_BYTES = {OURS: 26, OURS_8BIT: 14 + 1 / 16, SHORT: 24, SHORT_8BIT: 12 + 1 / 16}
HELD_BYTES = 14 + 8 + 13 + 7 + 1 / 8 + 20 + 2  # a parameter, of ours, torch's and the gradients to copy from
PEER_HELD_BYTES = 20 + 2
WHOLE = 2048  # sizes are multiples of it, without which torchao's moments are fp32
FIRST_STEPS = 3
# How far weights may be from torch's: the largest distance, of each weight's size plus the root mean square of all.
# Masters of 24 bits are rounded at the start and in each step.
BOUNDS = {OURS: 1e-6, SHORT: (FIRST_STEPS + 1) * 2.0**-15, PEERS["published"]: 1e-5, PEERS["deepspeed"]: 1e-5}
# In 8 bits single weights may go astray: the root mean square of the distances, of that of the way from the start.
BOUND_8BIT = 0.02
SETTLE_S = 0.01  # until the threads of the turn before have stopped spinning


class Contestant(Protocol):
    def refill(self) -> None: ...
    def step(self) -> Times: ...
    def sample(self) -> torch.Tensor: ...


class Ours:
    """The new weight is written where the gradient was, whose next one comes where the weight was."""

    def __init__(self, size: int, gradients: Gradients, format_: _core.StateFormat) -> None:
        master = adamw.initial_weights(size)
        self._weight = torch.empty(size, dtype=torch.bfloat16)
        self._gradient = torch.empty(size, dtype=torch.bfloat16)
        exact = torch.empty(size, dtype=torch.int16)
        _core.split(master, self._weight, exact)
        is_short = format_.masters == _core.MasterFormat.BITS_24
        self._remainder = torch.empty(size, dtype=torch.int8 if is_short else torch.int16)
        _core.convert_remainder(exact, self._remainder)
        self._hyper = _core.Hyperparameters()
        self._hyper.lr, self._hyper.eps, self._hyper.weight_decay = HYPER["lr"], HYPER["eps"], HYPER["weight_decay"]
        self._hyper.beta1, self._hyper.beta2 = HYPER["betas"]
        self._moments = format_.moments
        self._state = _core.make_state(_core.Algorithm.ADAMW, self._hyper, self._moments, self._weight)
        self._gradients = gradients
        self._steps = 0

    def refill(self) -> None:
        self._gradients.write(self._gradient, self._steps)

    def step(self) -> Times:
        begin = time.perf_counter_ns()
        _core.update(
            _core.Algorithm.ADAMW,
            self._hyper,
            self._moments,
            self._state,
            self._weight,
            self._gradient,
            self._remainder,
            None,
            self._gradient,
            1.0,
            1.0,
        )
        took = time.perf_counter_ns() - begin
        self._weight, self._gradient = self._gradient, self._weight
        self._steps += 1
        return Times(took, took, 0)

    def sample(self) -> torch.Tensor:
        weight, remainder = adamw.sample(self._weight), adamw.sample(self._remainder)
        exact = torch.empty(weight.shape, dtype=torch.int16)
        _core.convert_remainder(remainder, exact)
        master = torch.empty(weight.shape)
        _core.join(weight, exact, master)
        return master


class Peer:
    """support/adamw.py, running as a server."""

    def __init__(self, name: str, folder: Path, threads: int, size: int) -> None:
        self._name = name
        folder = folder.resolve()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        }
        command = [sys.executable, adamw.__file__, name, str(folder), str(threads), str(size)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._answer()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def refill(self) -> None:
        self._ask("refill")

    def step(self) -> Times:
        return Times(*self._ask("step"))

    def sample(self) -> torch.Tensor:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "sample")
            self._ask({"save": path})
            loaded: torch.Tensor = torch.load(path)
            return loaded

    def _ask(self, request: object) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._name} ended with {self._process.wait()}; its error stands above")
        return json.loads(line)


class Limits:
    """What the memory can do, at its best: two ways to copy, and a scale in place."""

    def __init__(self, floats: int, threads: int) -> None:
        self._source, self._target = torch.ones(floats), torch.ones(floats)
        self._parts = list(zip(self._source.chunk(threads), self._target.chunk(threads), strict=True))
        self._pool = ThreadPoolExecutor(threads)
        self.bytes = 2 * 4 * floats  # read and written, by each

    def __enter__(self) -> Limits:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def runs(self) -> dict[str, Callable[[], object]]:
        return {
            COPY: lambda: self._target.copy_(self._source),
            MEMCPY: lambda: list(self._pool.map(self._memcpy, self._parts)),
            SCALE: lambda: self._target.mul_(1.0),
        }

    def evict(self) -> None:
        """Reads so much that the caches hold nothing else."""
        self._source.sum()

    @staticmethod
    def _memcpy(part: tuple[torch.Tensor, torch.Tensor]) -> None:
        source, target = part
        target.numpy()[:] = source.numpy()  # the C library's memcpy, without the interpreter lock


class Measured:
    """One size with one number of threads: medians, in ns of a step."""

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads = size, threads
        self.total: dict[str, float] = {}
        self.optimizer: dict[str, float] = {}
        self.zeroing: dict[str, float] = {}
        self.limits_gb_per_s: dict[str, float] = {}
        self.distances: dict[str, float] = {}

    def row(self, *values: str) -> list[str]:
        return [f"{self.size / 1e6:.3g} M", str(self.threads), *values]

    def ns(self, times: dict[str, float], name: str) -> str:
        return f"{times[name] / self.size:.3f}" if name in times else "not measured"

    def ratio(self, peer: str, ours: str) -> str:
        return f"{self.total[peer] / self.total[ours]:.2f}" if peer in self.total else "not measured"

    def best_peer(self) -> str:
        return min((name for name in self.total if name not in OURS_BYTES), key=self.total.__getitem__)

    def traffic(self, ours: str) -> list[str]:
        """GB/s, of copy, of scale."""
        gb_per_s = OURS_BYTES[ours] * self.size / self.total[ours]
        copy = max(self.limits_gb_per_s[COPY], self.limits_gb_per_s[MEMCPY])
        return [f"{gb_per_s:.1f}", f"{gb_per_s / copy:.2f}", f"{gb_per_s / self.limits_gb_per_s[SCALE]:.2f}"]


def measure_all(contestants: dict[str, Contestant], limits: Limits, rounds: int, measured: Measured) -> None:
    times: dict[str, list[Times]] = {name: [] for name in contestants}
    runs = limits.runs()
    limit_ns: dict[str, list[int]] = {name: [] for name in runs}
    names = [*contestants, *runs]
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in contestants:
                contestants[name].refill()
            limits.evict()
            time.sleep(SETTLE_S)
            if name in contestants:
                times[name].append(contestants[name].step())
            else:
                begin = time.perf_counter_ns()
                runs[name]()
                limit_ns[name].append(time.perf_counter_ns() - begin)
    for name, taken in times.items():
        measured.total[name] = statistics.median(each.total_ns for each in taken)
        measured.optimizer[name] = statistics.median(each.optimizer_ns for each in taken)
        measured.zeroing[name] = statistics.median(each.zeroing_ns for each in taken)
    measured.limits_gb_per_s = {name: limits.bytes / statistics.median(taken) for name, taken in limit_ns.items()}


def check(contestants: dict[str, Contestant], start: torch.Tensor, measured: Measured) -> list[str]:
    """Takes the first steps, and compares the weights with torch's. What is wrong, if anything."""
    for contestant in contestants.values():
        for _ in range(FIRST_STEPS):
            contestant.refill()
            contestant.step()
    expected = contestants[TORCH].sample().double()
    root_mean_square = expected.square().mean().sqrt()
    wrong = []
    for name, contestant in contestants.items():
        apart = contestant.sample().double() - expected
        if name in IN_8_BITS:
            distance, bound = (apart.norm() / (expected - start).norm()).item(), BOUND_8BIT
        else:
            distance = (apart.abs() / (expected.abs() + root_mean_square)).max().item()
            bound = BOUNDS.get(name, 0)
        measured.distances[name] = distance
        if not distance <= bound:
            wrong.append(f"{name}, {measured.size} parameters, {measured.threads} threads: {distance:g} from torch's")
    return wrong


def print_tables(report: Report, results: Sequence[Measured]) -> None:
    peers = [TORCH, *PEERS.values()]
    names = [*FORMATS, *peers]
    header = ["parameters", "threads"]
    report("Nanoseconds a parameter from bf16 gradient to bf16 weight, casts included:")
    report("")
    report.table([*header, *names], [each.row(*(each.ns(each.total, name) for name in names)) for each in results])
    report("How many times as long as ours the others take. Best = the fastest of them:")
    report("")
    report.table(
        [*header, *(f"{peer} / ours" for peer in peers), "best", "best / ours", "best / ours, 8-bit"],
        [
            each.row(
                *(each.ratio(peer, OURS) for peer in peers),
                each.best_peer(),
                each.ratio(each.best_peer(), OURS),
                each.ratio(each.best_peer(), OURS_8BIT),
            )
            for each in results
        ],
    )
    report("Memory traffic in GB/s. Of copy = ours, as a share of the better copy; of scale = of the scale in place,")
    report("which, as ours does, writes only what it has read:")
    report("")
    shares = (", of copy", ", of scale")
    report.table(
        [*header, "torch copy", "memcpy", "scale", *(f"{ours}{of}" for ours in OURS_BYTES for of in ("", *shares))],
        [
            each.row(
                *(f"{each.limits_gb_per_s[limit]:.1f}" for limit in (COPY, MEMCPY, SCALE)),
                *(text for ours in OURS_BYTES for text in each.traffic(ours)),
            )
            for each in results
        ],
    )
    report("The others' optimizer alone, without the casts, and zeroing the gradient; nanoseconds a parameter:")
    report("")
    report.table(
        [*header, *(f"{peer}, alone" for peer in peers), "zeroing"],
        [
            each.row(*(each.ns(each.optimizer, peer) for peer in peers), each.ns(each.zeroing, TORCH))
            for each in results
        ],
    )
    report(f"Distance of the fp32 weights from torch's after {FIRST_STEPS} steps; bounds stand in the program:")
    report("")
    report.table(
        [*header, *names],
        [
            each.row(*(f"{each.distances[name]:.1e}" if name in each.distances else "not measured" for name in names))
            for each in results
        ],
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=float, nargs="+", default=[1, 10, 50, 200], help="million parameters")
    arguments.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--published", type=Path, help="folder with roundpipe 0.1.1")
    arguments.add_argument("--deepspeed", type=Path, help="folder with DeepSpeed")
    arguments.add_argument("--torchao", type=Path, help="folder with torchao")
    arguments.add_argument("--bitsandbytes", type=Path, help="folder with bitsandbytes")
    options = arguments.parse_args()
    limit_floats = 64 << 20
    if options.quick:
        options.sizes, options.rounds, limit_floats = [0.01, 0.1], 2, 1 << 20
    folders = {name: folder for name in PEERS if (folder := getattr(options, name)) is not None}
    report = Report("Optimizer: one AdamW step on the host, from bf16 gradients to bf16 weights", options.out)
    report(
        f"Medians of {options.rounds} rounds in which all take turns, with cold caches. "
        f"Bytes read and written a parameter: {', '.join(f'{name} {each:.2f}' for name, each in OURS_BYTES.items())}, "
        "an fp32 optimizer with its casts 40. GB/s count reads and writes."
    )
    report("")
    for name in PEERS:
        if name not in folders:
            report(f"{PEERS[name]}: not measured. --{name} FOLDER says where it is installed, --help how that is done.")
            report("")
    results, wrong, versions = [], [], {}
    for size in [math.ceil(millions * 1e6 / WHOLE) * WHOLE for millions in options.sizes]:
        needed = size * (HELD_BYTES + PEER_HELD_BYTES * len(folders)) + 8 * limit_floats + (len(folders) << 29)
        if needed > free_host_bytes():
            report(
                f"{size} parameters need {needed / 1e9:.1f} GB of memory, {free_host_bytes() / 1e9:.1f} GB are free."
            )
            report("")
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            _core.set_threads(threads, False)
            measured = Measured(size, threads)
            with ExitStack() as stack:
                gradients = Gradients(size)
                contestants: dict[str, Contestant] = {
                    **{name: Ours(size, gradients, format_) for name, format_ in FORMATS.items()},
                    TORCH: WithCasts(
                        size, gradients, lambda parameters: torch.optim.AdamW(parameters, fused=True, **HYPER)
                    ),
                }
                for name, folder in folders.items():
                    contestants[PEERS[name]] = peer = stack.enter_context(Peer(name, folder, threads, size))
                    versions[name] = peer.version
                limits = stack.enter_context(Limits(limit_floats, threads))
                wrong += check(contestants, adamw.sample(adamw.initial_weights(size)), measured)
                measure_all(contestants, limits, options.rounds, measured)
            results.append(measured)
    for name, version in versions.items():
        report(f"{PEERS[name]} said that its version is {version}.")
        report("")
    print_tables(report, results)
    report.close()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
