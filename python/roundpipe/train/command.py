"""The `roundpipe train` command. The work is imported when it runs."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from roundpipe.train.config import TrainConfig
from roundpipe.train.interface.help import show_all


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainConfig):
    """The command line: values of a configuration, and what to do with it. Only `merged` checks values."""

    config: Annotated[
        Path | None,
        typer.Option(help="A configuration in TOML; options come before it.", metavar="FILE", show_default=False),
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole configuration as a file, and end.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would happen, how long, and in how much memory, and end.")
    ] = False
    machine: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run: a machine file of `roundpipe plan --measure` (default: it is measured).",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    show: Annotated[
        int | None,
        typer.Option(
            help="Print so many samples, with what is learnt of them marked, and end.",
            metavar="N",
            min=1,
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint in --out, with its configuration, or begin."),
    ] = False

    help_all: Annotated[
        bool, typer.Option("--help-all", callback=show_all, is_eager=True, help="Show all options in their groups.")
    ] = False

    def __post_init__(self) -> None:
        """Nothing is refused before the file has been read."""

    def merged(self, given: frozenset[str]) -> TrainConfig:
        """The run's configuration: given options before the file of --config, before the configuration of a run that
        goes on, before defaults.

        Raises:
            ValueError: a file has an unknown key, or a value does not fit.
        """
        from roundpipe.train.config_file import read_config
        from roundpipe.train.run_folder import CONFIG_FILE

        values: dict[str, Any] = {}
        stored = Path(self.out) / CONFIG_FILE
        if self.resume and self.out and stored.exists():
            values |= read_config(stored)
        if self.config is not None:
            values |= read_config(self.config)
        fields = {field.name for field in dataclasses.fields(TrainConfig)}
        values |= {name: getattr(self, name) for name in fields & given}
        return TrainConfig(**values)


def train(options: TrainOptions, given: frozenset[str]) -> None:
    """Train a language model on texts, conversations, pictures or compared answers: all weights, or adapters.

    roundpipe train --model MODEL --data chat.jsonl --out run

    The result is a folder that transformers (for adapters: PEFT) loads. Ctrl+C saves, and prints the command that goes
    on. See docs/train.md.

    Exits with 2 for a wrong argument, with 1 for an error or a dry run that does not fit, and with 130 after Ctrl+C.
    """
    from roundpipe.train.config_file import written_config

    if options.machine is not None and not options.dry_run:
        raise ValueError("[train] --machine is given without --dry-run, expected both; give --dry-run, or leave it out")
    config = options.merged(given)
    if options.print_config:
        typer.echo(written_config(config), nl=False)
        return
    config.require_run(to_train=options.show is None)
    if sys.stderr.isatty():
        typer.echo("roundpipe: importing torch and transformers", err=True)  # for many seconds, the first time
    try:
        if options.show is not None:
            from roundpipe.train.shown import show

            show(config, options.show, typer.echo)
            code = 0
        elif options.dry_run:
            from roundpipe.train.dry_run import dry_run

            code = 0 if dry_run(config, options.resume, typer.echo, options.machine) else 1
        else:
            from roundpipe.train.session import run

            code = run(config, options.resume)
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted before the first step; start it again", err=True)
        code = 130
    raise typer.Exit(code)
