"""How fast are weights encoded and decoded on the host, beside a copy of the same bytes and bitsandbytes' kernels?

All contestants of a size run in turn, in rounds, each round beginning with another one; a turn begins with caches full
of something else. "copy" copies as many bytes as the plain weights have. bitsandbytes is used if it is installed
(pip install bitsandbytes); its numbers are compared with ours first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from support.report import Report, parser

from roundpipe import _core

BLOCK = 64
COPY, PEER = "copy", "bitsandbytes nf4"


def peer() -> Any:
    """bitsandbytes' functions; None without it."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return None
    return functional


def contestants(weight: torch.Tensor, decodes: bool) -> dict[str, Callable[[], Any]]:
    """By name, one encoding or decoding of the weight. Raises SystemExit if bitsandbytes has other numbers."""
    target = torch.empty_like(weight)
    found: dict[str, Callable[[], Any]] = {COPY: lambda: target.copy_(weight)}
    for format in _core.format_names():
        if decodes:
            encoding, parts = _core.Encoding(format, weight.dtype), _core.encode(format, weight)
            found[format] = lambda encoding=encoding, parts=parts: encoding.values(parts)
        else:
            found[format] = lambda format=format: _core.encode(format, weight)
    functional = peer()
    if functional is not None:
        codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        ours = _core.Encoding("nf4", torch.float32).values(_core.encode("nf4", weight))
        theirs = functional.dequantize_4bit(codes, state).float()
        if (ours - theirs).abs().max() > 2**-7 * ours.abs().max():  # theirs are rounded to bf16
            raise SystemExit("bitsandbytes' numbers are not ours")
        found[PEER] = (
            (lambda: functional.dequantize_4bit(codes, state))
            if decodes
            else (lambda: functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
        )
    return found


def seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Medians over rounds, after one that warms up."""
    spoiled = torch.empty(8 << 20)
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            spoiled.fill_(index)
            begun = time.perf_counter()
            runs[name]()
            if index > 0:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=4096)
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    if options.quick:
        options.rows, options.width, options.rounds = 64, 256, 1
    report = Report("Encoding and decoding weights on the host", options.out)
    weight = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    report(
        f"A bf16 matrix of {options.rows} x {options.width}, medians of {options.rounds} rounds; GB of bf16 a second."
    )
    report("")
    for title, decodes in (("encode", False), ("decode", True)):
        times = seconds(contestants(weight, decodes), options.rounds)
        rows = [
            (name, f"{weight.nbytes / each / 1e9:.2f}", f"{times[COPY] / each:.2f}") for name, each in times.items()
        ]
        report.table((title, "GB/s", "of a copy"), rows)
    report.close()


if __name__ == "__main__":
    main()
