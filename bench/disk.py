"""What does a disk for moments reach, beside plain sequential reads and writes of the same bytes? And a step?

The first table moves `--gb` GB on `--folder`, each round in turns: plain direct writes of 8 MiB, one after the other,
plain direct reads, and what the engine's disk tier reaches when it only writes, only reads, and does both, as a step
does. The second table has steps of a model whose moments are in memory, and on the disk: as fast as the disk is, if
nothing else takes longer. All is removed afterwards.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _core

PART_BYTES = 8 << 20
ROWS = 2


def plain(path: Path, size: int, writes: bool) -> float:
    """GB/s of direct transfers, one after the other."""
    part = mmap.mmap(-1, PART_BYTES)
    part.write(os.urandom(PART_BYTES))
    flags = os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT)
    try:
        began = time.perf_counter()
        for offset in range(0, size, PART_BYTES):
            if writes:
                os.pwritev(descriptor, [part], offset)
            else:
                os.preadv(descriptor, [part], offset)
        return size / (time.perf_counter() - began) / 1e9
    finally:
        os.close(descriptor)


class Training:
    """Linear layers in bf16 on one virtual device, in asynchronous steps."""

    def __init__(self, layers: int, width: int, disk: str | None) -> None:
        roundpipe.devices("virtual:1")
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        config = RoundPipeRunConfig(num_microbatch=1)
        self.model = RoundPipe(made, name="bench", model_run_config=config)
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-3, disk=disk)
        self._batch = torch.randn(ROWS, width).bfloat16()

    def step(self) -> None:
        self.model.forward_backward((self._batch,), loss_fn=lambda outputs, _: outputs.float().square().mean())
        self.model.step(self.optimizer)

    def seconds(self, steps: int) -> float:
        """Of a step, in the mean, after one that makes the moments."""
        self.step()
        self.model.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.model.synchronize()
        return (time.perf_counter() - began) / steps


def rounds_of(count: int, work: Callable[[], tuple[float, ...]]) -> list[float]:
    return [median(column) for column in zip(*(work() for _ in range(count)), strict=True)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk")
    options.add_argument("--gb", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--width", type=int, default=2048)
    given = options.parse_args()
    if given.quick:
        given.gb, given.rounds, given.steps, given.layers, given.width = 0.1, 1, 1, 6, 256
    report = Report("Moments on a disk", given.out)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path, size = Path(folder) / "plain", int(given.gb * 1e9) // PART_BYTES * PART_BYTES

        def rates() -> tuple[float, ...]:
            own = (plain(path, size, True), plain(path, size, False))
            path.unlink()
            tier = _core.measure_disk(folder, size)
            return (*own, tier.write_gb_per_s, tier.read_gb_per_s, tier.both_gb_per_s)

        write, read, tier_write, tier_read, both = rounds_of(given.rounds, rates)
        report.table(
            ["GB/s", "plain, direct", "disk tier", "share"],
            [
                ["write", f"{write:.2f}", f"{tier_write:.2f}", f"{tier_write / write:.0%}"],
                ["read", f"{read:.2f}", f"{tier_read:.2f}", f"{tier_read / read:.0%}"],
                ["read, and write as much", "", f"{both:.2f}", ""],
            ],
        )
        in_memory = Training(given.layers, given.width, None).seconds(given.steps)
        training = Training(given.layers, given.width, folder)
        on_disk = training.seconds(given.steps)
        stats, memory = training.optimizer.binding.disk_stats(), training.optimizer.host_memory()
        assert stats is not None
        moved = memory.moments_on_disk + memory.moments
        report.table(
            ["step", "ms", "moments in memory", "on the disk", "disk alone, ms"],
            [
                ["in memory", f"{1000 * in_memory:.0f}", f"{moved / 1e6:.0f} MB", "", ""],
                [
                    "on the disk",
                    f"{1000 * on_disk:.0f}",
                    f"{stats.most_memory_bytes / 1e6:.0f} MB",
                    f"{moved / 1e6:.0f} MB",
                    f"{moved / both / 1e6:.0f}",
                ],
            ],
        )
    report.close()


if __name__ == "__main__":
    main()
