"""Writes token files, as docs/token-files.md describes them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

from roundpipe import _core


def write_tokens(path: Path, documents: Sequence[Sequence[int]], vocabulary: int) -> Path:
    """Writes these documents, with all checksums."""
    kind = numpy.dtype("<u2" if vocabulary <= 65536 else "<u4")
    tokens = numpy.concatenate([numpy.asarray(document) for document in documents]).astype(kind).tobytes()
    ends = numpy.cumsum([len(document) for document in documents]).astype("<u8").tobytes()
    numbers = (kind.itemsize, len(tokens) // kind.itemsize, len(documents), vocabulary)
    sums = (_core.crc32c(tokens), _core.crc32c(ends))
    header = struct.pack("<8sIIQQQII12x", b"RPTOKENS", 1, *numbers, *sums)
    header += struct.pack("<I", _core.crc32c(header))
    path.write_bytes(header + tokens + bytes(-len(tokens) % 8) + ends)
    return path
