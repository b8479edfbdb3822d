"""What a step of Muon costs on the host, beside one of AdamW: seconds, arithmetic and bytes of state a parameter.

Both take a bf16 gradient and bf16 weights with a 16-bit remainder, and write the new weights over the gradient. Muon's
products are torch's own, in bf16; torch's Muon over fp32 weights is timed as well, without its casts. The last line
says what a large model would need for one step at the rate that was measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from support.report import Report, parser

from roundpipe import _core

# Rows and columns, as in models with 0.6, 1.7 and 8 billion parameters.
SHAPES = ((1024, 1024), (3072, 1024), (2048, 2048), (6144, 2048), (4096, 4096))
ROUNDS = 5
# A layer of 8 billion parameters: queries and outputs, keys and values, and the MLP's three matrices.
LAYER_8B = ((4096, 4096, 2), (1024, 4096, 2), (14336, 4096, 3))
LAYERS_8B = 32
STEPS = 5  # of Newton-Schulz


def operations(rows: int, columns: int) -> float:
    """Multiplications and additions of one step's products."""
    small, large = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * small * small * large + 2.0 * small**3)


def fused(algorithm: _core.Algorithm, rows: int, columns: int) -> tuple[Callable[[], None], int]:
    """One step of the engine's rule, and the bytes that it keeps."""
    hyper = _core.Hyperparameters()
    hyper.momentum, hyper.nesterov, hyper.eps = 0.95, True, 1e-7
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    remainder = torch.empty(rows, columns, dtype=torch.int16)
    _core.split(torch.randn(rows, columns), weight, remainder)
    gradient, source = torch.empty_like(weight), torch.randn(rows, columns).bfloat16()
    format_ = _core.MomentFormat.FLOAT32
    state = _core.make_state(algorithm, hyper, format_, weight)

    def step() -> None:
        gradient.copy_(source)
        _core.update(algorithm, hyper, format_, state, weight, gradient, remainder, None, gradient)
        weight.copy_(gradient)

    return step, sum(tensor.nbytes for tensor in state.tensors)


def of_torch(rows: int, columns: int) -> Callable[[], None]:
    weight = torch.nn.Parameter(torch.randn(rows, columns))
    weight.grad = torch.randn(rows, columns)
    return torch.optim.Muon([weight]).step


def seconds(step: Callable[[], object], rounds: int) -> float:
    step()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    arguments = parser(__doc__)
    chosen = arguments.parse_args()
    report = Report("Muon: what a step costs on the host", chosen.out)
    rounds, shapes = (1, ((64, 48),)) if chosen.quick else (ROUNDS, SHAPES)
    rows, rate = [], 0.0
    for height, width in shapes:
        count = height * width
        muon, muon_bytes = fused(_core.Algorithm.MUON, height, width)
        adamw, adamw_bytes = fused(_core.Algorithm.ADAMW, height, width)
        times = [seconds(step, rounds) for step in (muon, of_torch(height, width), adamw)]
        work = operations(height, width)
        rate = work / times[0]
        rows.append(
            [
                f"{height} x {width}",
                f"{work / count / 1e3:.1f}",
                *(f"{1e9 * each / count:.1f}" for each in times),
                f"{rate / 1e12:.2f}",
                f"{muon_bytes / count:.0f}",
                f"{adamw_bytes / count:.0f}",
            ]
        )
    report(f"Medians of {rounds} steps, copies of weights and gradients included. ns = nanoseconds a parameter.")
    report("")
    names = ["matrix", "kFLOP a parameter", "Muon ns", "torch's Muon ns", "AdamW ns", "Muon TFLOP/s"]
    report.table([*names, "Muon state bytes", "AdamW state bytes"], rows)
    work = LAYERS_8B * sum(number * operations(height, width) for height, width, number in LAYER_8B)
    report("")
    report(
        f"The layers of a model of 8 billion parameters need {work / 1e12:.0f} TFLOP a step: {work / rate:.0f} s at "
        "the rate of the last row."
    )
    report.close()


if __name__ == "__main__":
    main()
