"""The `roundpipe quantise` command. The work is imported when it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundpipe.command_options import EncodedFormat
from roundpipe.export.bar import with_bar


@dataclass(frozen=True)
class QuantiseFolderOptions:
    """Options of `roundpipe quantise`, in the order of its help."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL_DIR", help="The model's folder, or its id in the local Hugging Face cache."),
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The folder to write: new, or empty.")]
    format: Annotated[
        EncodedFormat,
        typer.Option(help="Bits a weight: nf4 4.5, nf4-double 4.13, mxfp4 4.25, int8 8."),
    ] = "nf4"
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="A module that is not encoded; may be given again.", show_default=False),
    ] = None


def quantise(options: QuantiseFolderOptions) -> None:
    """Write a model with its weights in fewer bits, for adapters to train on, in the memory of one tensor.

    roundpipe quantise MODEL_DIR OUT_DIR --format nf4

    from_pretrained and `roundpipe train --lora` take OUT_DIR as it is. The weights of linear layers and of experts are
    encoded; embeddings, norms and the head stay. A run that fails leaves nothing behind.
    """
    from roundpipe.export.quantised_folder import quantise_folder

    made = with_bar(
        "quantising",
        lambda show: quantise_folder(options.model, options.out, options.format, options.keep or (), progress=show),
    )
    share = f"{made.encoded / made.plain:.1%} of {made.plain:,}"
    typer.echo(f"{options.format}: {made.encoded:,} bytes, {share}; error {made.error:.2%} of the weights (rms)")
    by_reason: Counter[str] = Counter()
    for reason, size in made.kept.values():
        by_reason[reason] += size
    for reason, size in by_reason.most_common():
        names = [name for name, (its, _) in made.kept.items() if its == reason]
        typer.echo(f"as they are: {size:,} bytes, {reason}: {_listed(names)}")
    typer.echo(f"written to {made.folder}", err=True)


def _listed(names: list[str]) -> str:
    shown = 3
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
