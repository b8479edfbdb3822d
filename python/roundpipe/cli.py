"""The `roundpipe` command line.

Each command lives in a module of its own that is cheap to import; torch and other heavy packages are imported when a
command runs, so `roundpipe --help` answers at once. A command is a function of one dataclass of options, whose fields
typer shows and fills. A new command is one `app.command(...)` line below.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import roundpipe
from roundpipe.checkpoints.runs.command import app as checkpoint
from roundpipe.command_options import OnceEach, of_fields
from roundpipe.data.tokens.command import tokenize
from roundpipe.export.command import export
from roundpipe.export.quantise_command import quantise
from roundpipe.plan.command import plan
from roundpipe.selftest.command import selftest
from roundpipe.train.command import train
from roundpipe.train.demo.command import demo
from roundpipe.train.interface.help import TrainCommand

app = typer.Typer(
    name="roundpipe",
    help="Train models whose weights live in host memory, on any number of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"roundpipe {roundpipe.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command("demo", cls=OnceEach)(demo)
app.command("train", cls=TrainCommand)(of_fields(train))
app.command("plan", cls=OnceEach)(of_fields(plan))
app.command("selftest", cls=OnceEach)(of_fields(selftest))
app.command("export", cls=OnceEach)(of_fields(export))
app.command("quantise", cls=OnceEach)(of_fields(quantise))
app.command("tokenize", cls=OnceEach)(of_fields(tokenize))
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    """Runs the command line. A caller's mistake ends with its message and exit code 2, without a traceback.

    Our own errors read `[where] ...`; a ValueError of any other form is a bug, and keeps its traceback.
    """
    try:
        app()
    except ValueError as error:
        if not str(error).startswith("["):
            raise
        print(f"roundpipe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
