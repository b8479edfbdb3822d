"""Atomic writes of files, and messages about missing ones."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`, atomically: no reader, and no crash, sees half of it.

    Raises:
        ValueError: the folder does not exist or cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"[files] cannot write {path}: {error.strerror}; expected a folder that exists and can be written"
        ) from None


def refuse_missing_folder(name_or_path: str | os.PathLike[str], where: str) -> None:
    """Raises ValueError, tagged with `where`, if a path is not a folder; names on the Hub (`owner/model`) pass."""
    text = os.fspath(name_or_path)
    written_as_path = isinstance(name_or_path, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if written_as_path and not Path(text).is_dir():
        raise ValueError(
            f"[{where}] {text} is no folder, expected one that save_pretrained wrote, or the name of a model on the Hub"
        )


def first_lines(error: Exception) -> str:
    """The beginning of a message that may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
