"""The `roundpipe export` command. The work is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundpipe.export.bar import with_bar


@dataclass(frozen=True)
class ExportOptions:
    """Options of `roundpipe export`, in the order of its help."""

    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The folder to write: new, or empty.")]
    merge: Annotated[
        Path, typer.Option(metavar="ADAPTER_DIR", help="A LoRA adapter as peft saves it.", show_default=False)
    ]
    base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE_DIR",
            help="The base model's folder, or its id in the local Hugging Face cache (default: the one that the "
            "adapter names).",
            show_default=False,
        ),
    ] = None


def export(options: ExportOptions) -> None:
    """Merge a LoRA adapter into its base model's weights, in the memory of one layer.

    roundpipe export --merge ADAPTER_DIR --base BASE_DIR OUT_DIR

    OUT_DIR gets the base's files with the merged weights in them, and loads with from_pretrained. The weights are those
    that peft's merge_and_unload() gives, in the dtype of the base's files. A run that fails leaves nothing behind.
    """
    from roundpipe.export.adapter import base_named_by
    from roundpipe.export.merge import merge_adapter

    base = base_named_by(options.merge) if options.base is None else options.base
    with_bar("merging", lambda show: merge_adapter(base, options.merge, options.out, progress=show))
    typer.echo(f"merged into {options.out}", err=True)
