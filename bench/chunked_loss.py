"""What do the head and the loss of a language model cost, forward and backward, with and without chunks?

The plain way is `F.linear`, a cast to fp32 and `F.cross_entropy`: the logits of all tokens exist several times. Ours is
`roundpipe.ops.linear_cross_entropy`, which holds one chunk of them, in exact and in fast arithmetic. Liger's fused
loss is measured where it runs (it needs Triton and an accelerator). All get the same inputs and take one forward and
backward in turn, in rounds, each round beginning with another one. Before that, losses and gradients are compared with
the plain ones.

Peak memory is what one forward and backward adds to the inputs at most, gradients included. On the host it is summed up
from every allocation and release that torch's allocator reports to its profiler, in a run of its own; what the matrix
library allocates by itself is not seen. On an accelerator it is the allocator's own peak.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from support.report import Report, parser
from torch.profiler import ProfilerActivity, profile

from roundpipe.ops import linear_cross_entropy

PLAIN, OURS, FAST, LIGER = "plain", "ours", "ours, fast", "Liger"
IGNORED = 0.1  # of the tokens
# Largest distance from the plain loss and gradients, of the largest of their entries.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
MIB = 1 << 20

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    vocabulary: int
    width: int
    tokens: int
    dtype: torch.dtype = torch.float32

    def row(self, *values: str) -> list[str]:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return [f"{self.vocabulary:,}", str(self.width), str(self.tokens), dtype, *values]


SIZES = [
    Size(32_000, 256, 1024),
    Size(32_000, 256, 8192),
    Size(32_000, 1024, 1024),
    Size(151_936, 256, 1024),
    Size(151_936, 1024, 1024),
    Size(32_000, 256, 1024, torch.bfloat16),
    Size(151_936, 256, 1024, torch.bfloat16),
]
QUICK_SIZES = [Size(500, 16, 300), Size(1001, 16, 200, torch.bfloat16)]


@dataclass
class Measured:
    size: Size
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, labels, reduction="mean")


def fast(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, labels, reduction="mean", arithmetic="fast")


def liger() -> tuple[Loss | None, str]:
    """Liger's loss, or why there is none."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]
    except ImportError as error:
        return None, f"not measured, since importing it failed: {error}"
    if not torch.cuda.is_available():
        return None, "not measured, since its kernels need a GPU"
    fused = LigerFusedLinearCrossEntropyLoss()
    return (lambda hidden, weight, labels: fused(weight, hidden, labels)), "measured"


class Case:
    """The inputs of one size."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(1)
        self.size = size
        hidden = torch.randn(size.tokens, size.width)
        weight = torch.randn(size.vocabulary, size.width) / size.width**0.5
        self.labels = torch.randint(size.vocabulary, (size.tokens,))
        self.labels[torch.rand(size.tokens) < IGNORED] = -100
        self.labels = self.labels.to(device)
        self.hidden = hidden.to(device, size.dtype).requires_grad_()
        self.weight = weight.to(device, size.dtype).requires_grad_()

    def run(self, loss: Loss) -> torch.Tensor:
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.weight, self.labels)
        value.backward()
        return value.detach()

    def results(self, loss: Loss) -> list[torch.Tensor]:
        value = self.run(loss)
        assert self.hidden.grad is not None and self.weight.grad is not None
        return [value, self.hidden.grad, self.weight.grad]

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_bytes(case: Case, loss: Loss, device: str) -> int:
    """What one forward and backward adds at most to the memory in use."""
    case.clear()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run(loss)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        case.run(loss)
    events: list[Any] = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest of loss and gradients, each of the expected one's largest entry."""
    return max(
        ((one - other).abs().max() / other.abs().max()).item() for one, other in zip(found, expected, strict=True)
    )


def measure(size: Size, losses: dict[str, Loss], rounds: int, device: str) -> Measured:
    case, measured = Case(size, device), Measured(size)
    expected = [tensor.clone() for tensor in case.results(plain)]
    for name, loss in losses.items():
        if name != PLAIN:
            measured.distances[name] = distance(case.results(loss), expected)
    del expected
    for name, loss in losses.items():
        measured.peak_bytes[name] = peak_bytes(case, loss, device)
    taken: dict[str, list[float]] = {name: [] for name in losses}
    names = list(losses)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            case.clear()
            synchronize(device)
            begin = time.perf_counter()
            case.run(losses[name])
            synchronize(device)
            taken[name].append(time.perf_counter() - begin)
    measured.seconds = {name: statistics.median(each) for name, each in taken.items()}
    return measured


def print_tables(report: Report, results: list[Measured], names: list[str]) -> None:
    header = ["vocabulary", "width", "tokens", "dtype"]
    others = [name for name in names if name != OURS]
    report("Milliseconds of one forward and backward, and how many times as long as ours the others take:")
    report("")
    report.table(
        [*header, *names, *(f"{name} / ours" for name in others)],
        [
            each.size.row(
                *(f"{each.seconds[name] * 1e3:.1f}" for name in names),
                *(f"{each.seconds[name] / each.seconds[OURS]:.2f}" for name in others),
            )
            for each in results
        ],
    )
    report("Peak memory in MiB that one forward and backward adds, of which the gradients are a part:")
    report("")
    report.table(
        [*header, *names, *(f"{name} / ours" for name in others), "gradients"],
        [
            each.size.row(
                *(f"{each.peak_bytes[name] / MIB:.1f}" for name in names),
                *(f"{each.peak_bytes[name] / each.peak_bytes[OURS]:.1f}" for name in others),
                f"{(each.size.vocabulary + each.size.tokens) * each.size.width * each.size.dtype.itemsize / MIB:.1f}",
            )
            for each in results
        ],
    )
    report("Largest distance of loss and gradients from the plain ones; bounds stand in the program:")
    report("")
    compared = [name for name in names if name != PLAIN]
    report.table(
        [*header, *compared],
        [each.size.row(*(f"{each.distances[name]:.1e}" for name in compared)) for each in results],
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--device", default="cpu", help="cpu or cuda")
    options = arguments.parse_args()
    sizes = SIZES
    if options.quick:
        sizes, options.rounds = QUICK_SIZES, 2
    report = Report("Head and loss of a language model: chunks against all logits at once", options.out)
    losses: dict[str, Loss] = {OURS: ours, FAST: fast, PLAIN: plain}
    fused, why = liger()
    if fused is not None:
        losses[LIGER] = fused
    report(
        f"Mean cross-entropy, {IGNORED:.0%} of the tokens ignored. Medians of {options.rounds} rounds in which all "
        "take turns. Peak memory is counted allocation by allocation as torch's allocator reports them."
    )
    report("")
    report(f"Liger's fused loss: {why}.")
    report("")
    results = []
    for size in sizes:
        results.append(measure(size, losses, options.rounds, options.device))
        milliseconds = (f"{name} {seconds * 1e3:.1f} ms" for name, seconds in results[-1].seconds.items())
        print(" | ".join(size.row(*milliseconds)), file=sys.stderr, flush=True)
    print_tables(report, results, list(losses))
    report.close()
    wrong = [
        f"{name}, {each.size}: {found:g} from the plain one"
        for each in results
        for name, found in each.distances.items()
        if not found <= BOUNDS[each.size.dtype]
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
