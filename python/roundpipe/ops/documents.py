"""The documents of packed rows on the host, for layers that would otherwise wait for their device to read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from roundpipe import _core

Known = tuple[torch.Tensor, torch.Tensor | None, _core.Documents]
"""A table of documents, the positions beside it, and what they say."""


class _Here(threading.local):
    tables: list[torch.Tensor] | None = None
    known: Sequence[Known] = ()


_here = _Here()


@contextmanager
def noting_tables() -> Iterator[list[torch.Tensor]]:
    """Within the block, the tables that this thread makes are appended to the result."""
    before, _here.tables = _here.tables, []
    try:
        yield _here.tables
    finally:
        _here.tables = before


def note_table(table: torch.Tensor) -> None:
    """Notes a table of documents that has just been made on the host."""
    if _here.tables is not None:
        _here.tables.append(table)


@contextmanager
def knowing(documents: Sequence[Known]) -> Iterator[None]:
    """Within the block, this thread looks up the documents of these tables, which may be on a device."""
    before, _here.known = _here.known, documents
    try:
        yield
    finally:
        _here.known = before


def documents_of(table: torch.Tensor, positions: torch.Tensor | None, rows: int, tokens: int) -> _core.Documents:
    """The documents of a table: those that are known, or else read, which waits for the table's device."""
    for known, placed, documents in _here.known:
        if known is table and placed is positions:
            return documents
    return _core.read_documents(table, positions, rows, tokens)
