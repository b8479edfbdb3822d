"""The `roundpipe tokenize` command. The work is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Documents(StrEnum):
    """What a document of a text file is."""

    FILE = "file"
    LINE = "line"


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of `roundpipe tokenize`, in the order of its help."""

    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="Texts in UTF-8, JSONL files (.jsonl, .ndjson), or folders of them."),
    ]
    tokenizer: Annotated[
        str,
        typer.Option(metavar="DIR|ID", help="A model's folder, or its id in the local cache.", show_default=False),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE", help="The token file to write.", show_default=False)]
    field: Annotated[str, typer.Option(help="The member of JSONL records that holds the text.")] = "text"
    documents: Annotated[Documents, typer.Option(help="Whether a text file is one document, or each line.")] = (
        Documents.FILE
    )
    ends: Annotated[bool, typer.Option(help="End each document with the end-of-text token.")] = True
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False


def tokenize(options: TokenizeOptions) -> None:
    """Make a token file from texts and JSONL files.

    roundpipe tokenize --tokenizer MODEL_DIR --out train.tokens texts/ more.jsonl

    A token file is a flat array of tokens with a small header (docs/reference/token-files.md), which roundpipe-train
    and other programs in C++ read. Texts are read one after the other. What cannot be used is left out, counted, and
    named with its file and line. A run that fails leaves nothing behind.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from roundpipe import _core
    from roundpipe.data.tokenizer import load_tokenizer
    from roundpipe.data.tokens.texts import files_of, first_repeated, identity_of
    from roundpipe.data.tokens.tokenize import Tokenized, tokenize_files

    if options.out.exists() and not options.overwrite:
        raise ValueError(f"[tokenize] {options.out} is there, expected a new file; give --overwrite to replace it")
    files = files_of(options.inputs)
    repeated = first_repeated((identity_of(file), str(file)) for file in files)
    if repeated is not None:
        before, file = repeated
        twice = f"{file} is given twice" if before == file else f"{before} and {file} are the same file"
        raise ValueError(f"[tokenize] {twice}, expected each once; leave one out")
    try:
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("loading the tokenizer", total=None)

            def show(done: Tokenized) -> None:
                bar.update(task, description=f"{done.documents:,} documents, {done.tokens:,} tokens")

            done = tokenize_files(
                files,
                options.out,
                load_tokenizer(options.tokenizer),
                name=options.field,
                split="line" if options.documents is Documents.LINE else "file",
                ends=options.ends,
                progress=show,
            )
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted, nothing was written", err=True)
        raise typer.Exit(130) from None
    except _core.RoundPipeError as error:
        typer.echo(f"roundpipe: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"{options.out}: {done.documents:,} documents, {done.tokens:,} tokens, the longest document has "
        f"{done.longest:,}"
    )
    if done.unknown:
        typer.echo(f"{done.unknown:,} tokens are unknown to the tokenizer ({done.unknown / done.tokens:.2%})")
    if done.dropped.reasons:
        typer.echo(str(done.dropped))
