"""Writes small token files by the package's own writer, which C++ programs then read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundpipe.data.tokens.writer import token_file


def write_tokens(path: Path, documents: Sequence[Sequence[int]], vocabulary: int) -> Path:
    """Writes these documents."""
    with token_file(path, vocabulary) as writer:
        for document in documents:
            writer.append(document)
    return path
