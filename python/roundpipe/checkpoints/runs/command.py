"""The `roundpipe checkpoint` commands. The work is imported when one runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from roundpipe.command_options import OnceEach

app = typer.Typer(help="Look at checkpoints, verify them, convert them.", no_args_is_help=True)


@app.command("show", cls=OnceEach)
def show(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.", show_default=False)],
) -> None:
    """Show the checkpoints of a run, what is in the newest one, and the journal's last step.

    Reads only manifests and states, so it works beside a running training.
    """
    from roundpipe.checkpoints.runs.show import describe

    for line in describe(folder):
        typer.echo(line)


@app.command("verify", cls=OnceEach)
def verify(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.", show_default=False)],
) -> None:
    """Read every byte of a checkpoint, or of all of a run, and compare checksums.

    Ends with 1 if something is damaged.
    """
    from roundpipe.checkpoints.runs.show import problems_of

    found = False
    for path, problems in problems_of(folder, lambda text: typer.echo(text, err=True)):
        for problem in problems:
            typer.echo(f"{path / problem.file}: {problem.problem}")
        if not problems:
            typer.echo(f"{path}: whole")
        found |= bool(problems)
    if found:
        sys.exit(1)


@app.command("convert", cls=OnceEach)
def convert(
    source: Annotated[
        Path, typer.Argument(help="A run's folder (its newest checkpoint) or one checkpoint.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)],
    to: Annotated[
        Literal["hf", "dcp"] | None,
        typer.Option(help="hf: weights and configuration for transformers. dcp: torch.distributed.checkpoint."),
    ] = None,
    from_: Annotated[
        Literal["dcp"] | None, typer.Option("--from", help="Write weights of a torch.distributed.checkpoint as hf.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Read the pickled metadata of --from dcp, which can run any code.")
    ] = False,
) -> None:
    """Convert a checkpoint to a plain Hugging Face folder, or to or from torch.distributed.checkpoint."""
    from roundpipe.checkpoints.runs import convert as conversion
    from roundpipe.files import check_free

    if (to is None) == (from_ is None):
        raise ValueError("[checkpoint] expected either --to hf, --to dcp or --from dcp")
    check_free(out, "checkpoint")
    if from_ == "dcp":
        conversion.from_dcp(source, out, trust)
    elif to == "dcp":
        conversion.to_dcp(source, out)
    else:
        conversion.to_hugging_face(source, out)
    typer.echo(f"wrote {out}", err=True)
