"""The `roundpipe selftest` command. The work is imported when it runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from roundpipe.plan.options import require

_LEAST_BYTES, _MOST_BYTES = 100_000, 1_000_000_000


@dataclasses.dataclass(frozen=True)
class SelftestOptions:
    """Options of `roundpipe selftest`, in the order of its help."""

    devices: Annotated[
        str | None,
        typer.Option(
            help="What to check, as for roundpipe.devices, such as cuda:0,cuda:1 (default: ROUNDPIPE_DEVICES, else all "
            "accelerators, else virtual devices).",
            show_default=False,
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="How often each check repeats, with other bytes and batches.")] = 3
    size: Annotated[
        str, typer.Option(help="The largest tensor that travels, at most; more than a chunk of a transfer by default.")
    ] = "96MB"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False

    def __post_init__(self) -> None:
        require(1 <= self.rounds <= 10_000, "rounds", self.rounds, "1 to 10000")
        require(_LEAST_BYTES <= self.size_bytes() <= _MOST_BYTES, "size", self.size, "100KB to 1GB")

    def size_bytes(self) -> int:
        """The largest tensor's bytes."""
        from roundpipe import _core

        return _core.parse_bytes(self.size)


def selftest(options: SelftestOptions) -> None:
    """Check that devices compute and move the right bits, against plain PyTorch, and name the one that does not.

    roundpipe selftest
    roundpipe selftest --devices cuda:0,cuda:1 --rounds 100

    Exits with 1 if any bit is wrong. Some seconds for each device; a card that fails rarely needs more rounds.
    """
    import roundpipe
    from roundpipe.selftest.finding import verdict
    from roundpipe.selftest.session import selftest as checks

    pool = roundpipe.devices(options.devices)
    findings = []
    for finding in checks(pool, options.rounds, options.size_bytes()):
        findings.append(finding)
        if not options.as_json:
            line = f"{finding.device:<12} {finding.check:<9} {finding.what:<36} {'ok' if finding.ok else 'WRONG':<6}"
            typer.echo(f"{line} {finding.detail}")
    found = verdict(findings)
    if options.as_json:
        document = {
            "schema": "roundpipe-selftest",
            "devices": list(pool),
            "rounds": options.rounds,
            "whole": found.is_whole,
            "wrong": found.wrong,
            "unclear": [dataclasses.asdict(finding) for finding in found.unclear],
            "checks": [dataclasses.asdict(finding) for finding in findings],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        for name, failed in found.wrong.items():
            counted = ", ".join(f"{len(whats)} of {check}" for check, whats in failed.items())
            typer.echo(f"wrong: {name} ({counted})")
        for finding in found.unclear:
            typer.echo(f"wrong: one or more of {', '.join(finding.suspects)} ({finding.check}: {finding.what})")
        if found.is_whole:
            typer.echo(f"whole: {len(pool)} devices, {len(findings)} checks")
    if not found.is_whole:
        raise typer.Exit(1)
