"""The command that trains the demo's model further, in a form that works where the demo was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def going_on(folder: Path, model: Path, conversations: Path, length: int) -> str:
    """How to fine-tune the demo's model, and one's own.

    Args:
        folder: where the demo was started.
        model: the folder that the demo has saved.
        conversations: that it has written.
        length: tokens of a row.
    """
    out = model.with_name("chat-model")
    options = ["--model", str(model), "--data", str(conversations), "--out", str(out), "--length", str(length)]
    command = [*_program(folder), "train", *options, "--learning-rate", "1e-3"]
    return (
        "this model learns to answer questions about Python's library, in a minute or two:\n"
        f"  {shlex.join(command)}\n"
        "your own model, a folder or a name on the Hub, learns from your conversations with the same command "
        "(docs/train.md)"
    )


def _program(folder: Path) -> list[str]:
    """The command line of this Python, as it is started from `folder`."""
    python = Path(sys.executable)
    beside = python.with_name("roundpipe")
    if not beside.exists():
        return [str(python), "-m", "roundpipe.cli"]
    if beside.is_relative_to(folder):
        return [str(beside.relative_to(folder))]
    found = shutil.which("roundpipe")
    return ["roundpipe"] if found is not None and os.path.samefile(found, beside) else [str(beside)]
