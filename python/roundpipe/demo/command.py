"""The `roundpipe demo` command. Only its options live at the top; the work is imported when it runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from roundpipe.demo.options import DTYPES, FULL, VIRTUAL_DEVICES, DemoOptions

_DEFAULT = DemoOptions()


@contextlib.contextmanager
def _imports_interrupted() -> Iterator[None]:
    """Ctrl+C while packages load ends as KeyboardInterrupt, even where a package makes an error of its own from it."""
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt


def demo(
    full: Annotated[
        bool, typer.Option("--full", help=f"Train for {FULL.steps} steps on more text, in four to five minutes.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Training steps (default: {_DEFAULT.steps}, with --full {FULL.steps}).", show_default=False),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Device pool, such as virtual:4,memory=64MiB "
            f"(default: ROUNDPIPE_DEVICES, else the accelerators found, else {VIRTUAL_DEVICES}).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds weights and batches.")] = _DEFAULT.seed,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for metrics and curve (default: runs/demo-<date>-<time>).", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = _DEFAULT.batch_size,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.sequence_length,
    dtype: Annotated[str, typer.Option(help=f"Type of the weights: {', '.join(DTYPES)}.")] = _DEFAULT.dtype,
    save_every: Annotated[
        int | None,
        typer.Option(
            help="A checkpoint after this many steps, in OUT/checkpoints (default: none).", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder given with --out.")
    ] = False,
) -> None:
    """Prove in 20 seconds that RoundPipe trains what a device cannot hold, with the bits of a plain PyTorch loop; then
    train a small Llama on Python's own sources for about two minutes.

    Exits with 1 when a claim does not hold, with 2 for a wrong argument, and with 130 after Ctrl+C.
    """
    base = FULL if full else _DEFAULT
    options = replace(
        base,
        steps=base.steps if steps is None else steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        seed=seed,
        dtype=dtype,
    )
    try:
        typer.echo(
            "RoundPipe demo: a proof of some 20 seconds, then training; Ctrl+C stops it at any time\n"
            "loading PyTorch and transformers"
        )
        with _imports_interrupted():
            from roundpipe.demo.session import run_demo
        code = run_demo(options, devices, out, save_every, resume)
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted", err=True)
        code = 130
    raise typer.Exit(code)
