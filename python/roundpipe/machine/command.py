"""The `roundpipe machine` command. The work is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundpipe.planning.options import require, require_files


@dataclass(frozen=True)
class MachineOptions:
    """Options of `roundpipe machine`, in the order of its help."""

    devices: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICES",
            help="What to measure, as for roundpipe.devices, such as cuda:0,cuda:1 (default: ROUNDPIPE_DEVICES, else "
            "all accelerators, else virtual devices).",
            show_default=False,
        ),
    ] = None
    save: Annotated[Path | None, typer.Option(help="Write the machine file here, not to the terminal.")] = None
    rounds: Annotated[int, typer.Option(help="Measurements of each figure; the median counts.")] = 3

    def __post_init__(self) -> None:
        require(1 <= self.rounds <= 100, "rounds", self.rounds, "1 to 100")
        require_files({"save": self.save})


def machine(options: MachineOptions) -> None:
    """Measure devices, links, host and optimizer, and write them as a machine file for `plan` and `simulate`.

    roundpipe machine --save machine.toml
    roundpipe plan qwen3-32b --links --machine machine.toml

    Measured is what the engine reaches, in some seconds for each device; nothing else should run meanwhile. Of a
    virtual device, this is what the host's memory and cores give, or the caps in DEVICES.
    """
    import roundpipe
    from roundpipe.files import write_text
    from roundpipe.machine.meter import measure

    pool = roundpipe.devices(options.devices)
    found = measure(pool, options.rounds, lambda what: typer.echo(f"measuring {what}", err=True))
    if options.save is None:
        typer.echo(found.text(), nl=False)
    else:
        write_text(options.save, found.text())
        typer.echo(f"wrote {options.save}", err=True)
