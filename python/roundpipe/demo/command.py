"""The `roundpipe demo` command. Only its options live at the top; the work is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundpipe.demo.options import DTYPES, VIRTUAL_DEVICES, DemoOptions

_DEFAULT = DemoOptions()


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULT.steps,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Device pool, such as virtual:4,memory=64MiB. "
            f"[default: the accelerators found, else {VIRTUAL_DEVICES}]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds weights, batches and sampled text.")] = _DEFAULT.seed,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for metrics and curve. [default: runs/demo-<date>-<time>]", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = _DEFAULT.batch_size,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.sequence_length,
    dtype: Annotated[str, typer.Option(help=f"Type of the weights: {', '.join(DTYPES)}.")] = _DEFAULT.dtype,
) -> None:
    """Train a small Llama on Python's own sources through the whole pipeline, in about five minutes."""
    options = DemoOptions(steps=steps, batch_size=batch_size, sequence_length=sequence_length, seed=seed, dtype=dtype)
    try:
        from roundpipe.demo.session import run_demo

        code = run_demo(options, devices, out)
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted", err=True)
        code = 130
    raise typer.Exit(code)
