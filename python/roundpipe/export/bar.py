"""The progress bar of commands that write a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

Made = TypeVar("Made")


def with_bar(doing: str, write: Callable[[Callable[[int, int], None]], Made]) -> Made:
    """What `write` returns. Ctrl+C ends the command with code 130.

    Args:
        doing: stands before the bar, such as "merging".
        write: writes a folder, and calls its argument with the bytes so far and all of them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=None)
            return write(lambda done, total: bar.update(task, description=doing, completed=done, total=total))
    except KeyboardInterrupt:
        typer.echo("\nroundpipe: interrupted, nothing was written", err=True)
        raise typer.Exit(130) from None
