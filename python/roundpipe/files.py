"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`; a reader or a crash never meets half of it.

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
