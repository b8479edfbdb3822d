"""The `roundpipe demo` command. Only its options live at the top; the work is imported when it runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from roundpipe.train.demo.preset import FULL_STEPS, STEPS, VIRTUAL_DEVICES


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
        bool, typer.Option("--full", help=f"Train for {FULL_STEPS} steps on more text, in four to five minutes.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Training steps (default: {STEPS}, with --full {FULL_STEPS}).", show_default=False),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Device pool, such as virtual:4,memory=64MiB "
            f"(default: ROUNDPIPE_DEVICES, else the accelerators found, else {VIRTUAL_DEVICES}).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seeds the weights, the order and what is held out (default: 0).", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/demo-<date>-<time>).", show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of the weights (default: what a short measurement finds fast).", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder given with --out.")
    ] = False,
) -> None:
    """Prove in 20 seconds that RoundPipe trains what a device cannot hold, with the bits of a plain PyTorch loop; then
    train a small Llama on Python's own sources for about two minutes, with `roundpipe train`.

    Exits with 1 when a claim does not hold, with 2 for a wrong argument, and with 130 after Ctrl+C.
    """
    given = {"steps": steps, "devices": devices, "seed": seed, "dtype": dtype}
    values = {name: value for name, value in given.items() if value is not None}
    try:
        typer.echo(
            "RoundPipe demo: a proof of some 20 seconds, then training; Ctrl+C stops it at any time\n"
            "loading PyTorch and transformers"
        )
        with _imports_interrupted():
            from roundpipe.train.demo.session import run_demo
        code = run_demo(out, full, resume, values)
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted", err=True)
        code = 130
    raise typer.Exit(code)
