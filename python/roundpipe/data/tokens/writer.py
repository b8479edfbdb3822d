"""Writes token files, see `docs/reference/token-files.md`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roundpipe import _core


@contextmanager
def token_file(path: str | Path, vocabulary: int) -> Iterator[_core.TokenWriter]:
    """Gives a writer of a token file that replaces `path` at the end, whole; an exception leaves nothing behind.

    Args:
        path: the file.
        vocabulary: every token is smaller than this number.

    Raises:
        ValueError: the vocabulary is no positive number below 2^31, or no document was appended.
        RoundPipeError: the file cannot be written.
    """
    writer = _core.TokenWriter(str(path), vocabulary)
    try:
        yield writer
        writer.finish()
    finally:
        writer.discard()
