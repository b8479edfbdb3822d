"""What does a checkpoint cost? Saving against a plain write with fsync of the same bytes, loading against a plain read,
both against torch.distributed.checkpoint, and how much training slows down while a save is under way.

The state is that of bf16 linear layers with a fused AdamW. Everything is written to `--folder`, in turns, and removed
afterwards. Files are dropped from the system's cache before each read. All that is read is compared bit for bit.

In the training, each layer sleeps as long as an accelerator would compute, so that the host is busy with weights,
gradients and updates only. A step takes a quarter of the time of a save, or as long as the host needs for it. A save
then needs a copy of at most what the disk has not taken when the next updates come: the state - disk rate x step time.
`snapshot_memory` is given above that line, below it, and as one byte, with which every update waits for the disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from support.report import Report, parser
from torch import nn

import roundpipe

CHUNK_BYTES = 16 << 20
ROWS = 2
PLAIN_WRITE, DIRECT_WRITE = "plain write and fsync", "plain direct write and fsync"


class Layer(nn.Linear):
    """Linear, and takes as long as an accelerator is to take for one microbatch."""

    pause_s = 0.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if Layer.pause_s:
            time.sleep(Layer.pause_s)
        return super().forward(value)


class Training:
    """A model on one virtual device, and asynchronous steps."""

    def __init__(self, layers: int, width: int) -> None:
        roundpipe.devices("virtual:1")
        torch.manual_seed(0)
        self.layers = layers
        made = nn.Sequential(*(Layer(width, width, dtype=torch.bfloat16) for _ in range(layers)))
        config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
        self.model = roundpipe.RoundPipe(made, name="saved", model_run_config=config)
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-3)
        self._batch = torch.randn(ROWS, width).bfloat16()

    def step(self) -> None:
        loss = self.model.forward_backward((self._batch,), loss_fn=lambda outputs, _: outputs.float().square().mean())
        self.model.step(self.optimizer)
        float(loss)

    def seconds(self, steps: int) -> float:
        """Of one step, in the mean."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, what their fp32 masters have beyond them, and moments, in use."""
        self.model.synchronize()
        tensors = {}
        for name, parameter in self.model.named_parameters():
            state, remainder = self.optimizer.binding.state(parameter)
            tensors[f"{name}.weight"] = parameter.detach()
            if remainder is not None:
                tensors[f"{name}.remainder"] = remainder
            tensors.update((f"{name}.moment{index}", moment) for index, moment in enumerate(state.tensors))
        return tensors


@dataclass
class Measured:
    """Seconds of each round, and what was moved."""

    seconds: list[float]
    pauses: list[float]
    bytes: int = 0
    held: int = 0

    @property
    def gb_per_s(self) -> float:
        return self.bytes / median(self.seconds) / 1e9


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_write(path: Path, size: int, content: memoryview) -> None:
    """Sequentially, then fsync."""
    with open(path, "wb", buffering=0) as file:
        left = size
        while left:
            left -= file.write(content[: min(left, len(content))])
        os.fsync(file.fileno())


def direct_write(path: Path, size: int, content: memoryview) -> None:
    """As `plain_write`, past the system's cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        left = size - size % mmap.PAGESIZE
        while left:
            left -= os.write(descriptor, content[: min(left, len(content))])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_read(folder: Path, into: memoryview) -> None:
    """All files, one after the other."""
    for path in files_of(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(into):
                pass


def files_of(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def drop_from_cache(folder: Path) -> None:
    for path in files_of(folder):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def expect_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    if ours.keys() != expected.keys() or not all(torch.equal(ours[name], expected[name]) for name in expected):
        raise SystemExit(f"{what} has not given the bits that were saved")


class Disk:
    """Saves, loads and plain writes and reads of the same state, in turns."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._content = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # aligned, as direct writes need it
        self._content[:] = memoryview(torch.randint(256, (CHUNK_BYTES,), dtype=torch.uint8).numpy())
        self.measured: dict[str, Measured] = {}

    def _note(self, name: str, seconds: float, size: int, pause: float = 0.0, held: int = 0) -> None:
        entry = self.measured.setdefault(name, Measured([], []))
        entry.seconds.append(seconds)
        entry.pauses.append(pause)
        entry.bytes, entry.held = size, max(entry.held, held)

    def round(self) -> None:
        """Each way once."""
        training, run = self._training, self._folder / "run"
        training.step()
        expected = {name: tensor.clone() for name, tensor in training.state().items()}
        save = roundpipe.save_checkpoint(run, training.model, training.optimizer, wait=True)
        report, saved = save.wait(), Path(save.folder)
        self._note("save", report.seconds, report.bytes, report.caller_seconds, report.held_bytes)
        plain = self._folder / "plain"
        seconds = timed(lambda: plain_write(plain, report.bytes, self._content))
        self._note(PLAIN_WRITE, seconds, report.bytes)
        plain.unlink()
        with contextlib.suppress(OSError):  # not every file system takes direct writes
            self._note(DIRECT_WRITE, timed(lambda: direct_write(plain, report.bytes, self._content)), report.bytes)
        plain.unlink(missing_ok=True)

        training.step()  # loading replaces it
        training.model.synchronize()
        drop_from_cache(saved)
        seconds = timed(lambda: void(roundpipe.load_checkpoint(run, training.model, training.optimizer)))
        self._note("load", seconds, report.bytes)
        expect_same(training.state(), expected, "load_checkpoint")
        drop_from_cache(saved)
        self._note("plain read", timed(lambda: plain_read(saved, self._content)), report.bytes)
        shutil.rmtree(saved)
        self._torch_round(expected)

    def _torch_round(self, expected: dict[str, torch.Tensor]) -> None:
        from torch.distributed import checkpoint as torch_checkpoint

        state = dict(self._training.state())
        folder = self._folder / "torch"
        seconds = timed(lambda: void(torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)))
        size = bytes_of(folder)
        self._note("torch save", seconds, size, pause=seconds)
        read = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        drop_from_cache(folder)
        self._note("torch load", timed(lambda: torch_checkpoint.load(read, checkpoint_id=folder, no_dist=True)), size)
        expect_same(read, expected, "torch.distributed.checkpoint")
        shutil.rmtree(folder)
        began = time.perf_counter()
        pending = torch_checkpoint.async_save(state, checkpoint_id=folder, no_dist=True)
        pause = time.perf_counter() - began
        assert isinstance(pending, Future)
        pending.result()
        held = sum(tensor.nbytes for tensor in expected.values())  # it copies all of it
        self._note("torch async_save", time.perf_counter() - began, size, pause, held)
        shutil.rmtree(folder)


def void(result: object) -> None:
    """For what returns something that is not used."""


def slowdowns(training: Training, folder: Path, memories: dict[str, int], rounds: int) -> Iterator[list[str]]:
    """Rows of steps while a save is under way, for each amount of `snapshot_memory`, in turns."""
    found: dict[str, list[tuple[float, float, int, roundpipe.SaveReport]]] = {name: [] for name in memories}
    steps = 3
    for _ in range(rounds):
        for name, memory in memories.items():
            plain_s = training.seconds(steps)
            began = time.perf_counter()
            save = roundpipe.save_checkpoint(
                folder, training.model, training.optimizer, keep_last=1, snapshot_memory=memory
            )
            steps = 0
            while not save.done or steps < 2:
                training.step()
                steps += 1
            saving_s = (time.perf_counter() - began) / steps
            found[name].append((plain_s, saving_s, steps, save.wait()))
    for name, memory in memories.items():
        reports = [row[3] for row in found[name]]
        yield [
            name,
            f"{memory / 1e9:.3f}",
            f"{1e3 * median(row[0] for row in found[name]):.0f}",
            f"{1e3 * median(row[1] for row in found[name]):.0f}",
            f"{100 * median(row[1] / row[0] - 1 for row in found[name]):+.1f} %",
            f"{median(row[2] for row in found[name]):g}",
            f"{median(report.seconds for report in reports):.2f}",
            f"{1e3 * median(report.longest_wait_seconds for report in reports):.0f}",
            f"{max(report.held_bytes for report in reports) / 1e9:.3f}",
        ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: this folder)")
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--width", type=int, default=2048)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--step", type=float, help="seconds of a training step (default: see above)")
    options = arguments.parse_args()
    if options.quick:
        options.layers, options.width, options.rounds = 3, 64, 1
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    report = Report("Checkpoints: the disk, and training that goes on", options.out)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=options.folder) as made:
        folder = Path(made)
        training = Training(options.layers, options.width)
        training.seconds(2)
        disk = Disk(training, folder)
        for _ in range(options.rounds):
            disk.round()
        _print_disk(report, disk, options.rounds)
        _print_training(report, training, disk.measured["save"], folder / "training", options.rounds, options.step)
    report.close()


def _print_disk(report: Report, disk: Disk, rounds: int) -> None:
    report(f'Medians of {rounds} rounds; "share" is the rate divided by the plain one\'s, the median over the rounds.')
    report("")
    rows = []
    saves: tuple[str, ...] = ("save", "torch save", "torch async_save")
    if DIRECT_WRITE in disk.measured:
        saves = (DIRECT_WRITE, *saves)
    pairs = {PLAIN_WRITE: saves, "plain read": ("load", "torch load")}
    for plain, others in pairs.items():
        for name in (plain, *others):
            entry, base = disk.measured[name], disk.measured[plain]
            shares = [
                entry.bytes / seconds / (base.bytes / plain_s)
                for seconds, plain_s in zip(entry.seconds, base.seconds, strict=True)
            ]
            rows.append(
                [
                    name,
                    f"{entry.bytes / 1e9:.3f}",
                    f"{median(entry.seconds):.3f}",
                    f"{entry.gb_per_s:.2f}",
                    f"{median(shares):.2f}",
                    f"{1e3 * median(entry.pauses):.0f}" if any(entry.pauses) else "",
                    f"{entry.held / 1e9:.3f}" if any(entry.pauses) else "",
                ]
            )
    report.table(["what", "GB", "s", "GB/s", "share", "the caller waits ms", "holds GB"], rows)


def _print_training(
    report: Report, training: Training, save: Measured, folder: Path, rounds: int, wanted_s: float | None
) -> None:
    save_s = median(save.seconds)
    # Each layer runs forward and again before its backward.
    Layer.pause_s = max(0.0, (wanted_s or save_s / 4) - training.seconds(3)) / (2 * training.layers)
    step_s = training.seconds(3)
    line = max(0.0, save.bytes - save.gb_per_s * 1e9 * step_s)
    report(
        f"Training: {1e3 * step_s:.0f} ms a step, a state of {save.bytes / 1e9:.3f} GB, and a disk of "
        f"{save.gb_per_s:.2f} GB/s (that of the saves above), so the line is at {line / 1e9:.3f} GB. Milliseconds of a "
        "step in the mean, over the steps from a save's beginning to its end, and as many without one just before."
    )
    report("")
    memories = {
        "the whole state": save.bytes,
        "above the line": max(1, int(1.1 * line)),
        "below the line": max(1, int(0.25 * line)),
        "nothing": 1,
    }
    header = ["snapshot_memory", "GB", "step ms", "while saving", "slower", "steps", "save s", "longest wait ms"]
    report.table([*header, "held GB"], list(slowdowns(training, folder, memories, rounds)))


if __name__ == "__main__":
    main()
