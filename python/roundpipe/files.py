"""Atomic writes of files, JSON documents with a schema, and messages about missing files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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


def read_document(path: str | Path, where: str, kind: str, schema: str, version: int) -> dict[str, Any]:
    """Reads a JSON object whose `schema` and `version` are these. `kind` says in messages what the file should be.

    Raises:
        ValueError: tagged with `where`: no such file, no JSON, or another schema or version.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"[{where}] cannot read {path}: {error.strerror}; expected {kind}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"[{where}] {path} is not JSON: {error}; expected {kind}") from None
    if not isinstance(document, dict) or (document.get("schema"), document.get("version")) != (schema, version):
        raise ValueError(f"[{where}] {path} has no schema '{schema}' of version {version}; save the plan again")
    return document


def refuse_missing_folder(name_or_path: str | os.PathLike[str], where: str) -> None:
    """Raises ValueError, tagged with `where`, if a path is not a folder; names on the Hub (`owner/model`) pass."""
    text = os.fspath(name_or_path)
    written_as_path = isinstance(name_or_path, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if written_as_path and not Path(text).is_dir():
        raise ValueError(
            f"[{where}] {text} is not a folder, expected one that save_pretrained wrote, or the name of a model on the "
            "Hub"
        )


def first_lines(error: Exception) -> str:
    """The beginning of a message that may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
