"""Reads token files, see `docs/token-files.md`."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roundpipe import _core

_HEADER_BYTES = 64


class TokenFile:
    """A token file, mapped: documents are read when they are asked for.

    Attributes:
        documents: the number of documents.
        tokens: the number of tokens.
        vocabulary: every token is smaller than this number.
        checksum: the CRC-32C of the tokens' bytes, as the header says; `verify` compares.
        ends: the end of each document: the number of tokens in it and in all before it.

    Raises:
        ValueError: the file cannot be read, or it is cut or damaged. The tokens themselves are not read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            size_bytes = Path(path).stat().st_size
            with open(path, "rb") as file:
                header = file.read(_HEADER_BYTES)
        except OSError as error:
            raise ValueError(f"[tokens] cannot read {path}: {error.strerror}; expected a token file") from None
        if len(header) < _HEADER_BYTES or header[:8] != b"RPTOKENS" or header[48:60] != bytes(12):
            raise self._damaged("does not begin as a token file")
        _, version, size, tokens, documents, vocabulary, crc, crc_of_ends, own = struct.unpack("<8sIIQQQII12xI", header)
        if own != _core.crc32c(header[:60]):
            raise self._damaged("has a damaged header")
        if version != 1 or size not in (2, 4):
            raise ValueError(
                f"[tokens] {path} has version {version} with tokens of {size} bytes, expected 1 and 2 or 4"
            )
        begin = _HEADER_BYTES + -(-tokens * size // 8) * 8
        if size_bytes != begin + 8 * documents:
            raise self._damaged(f"has {size_bytes} bytes, expected {begin + 8 * documents}")
        self.documents: int = documents
        self.tokens: int = tokens
        self.vocabulary: int = vocabulary
        self.checksum: int = crc
        self._data: npt.NDArray[np.unsignedinteger] = np.memmap(
            path, dtype=f"<u{size}", mode="r", offset=_HEADER_BYTES, shape=(tokens,)
        )
        self.ends: npt.NDArray[np.uint64] = np.memmap(path, dtype="<u8", mode="r", offset=begin, shape=(documents,))
        if _checksum(self.ends) != crc_of_ends:
            raise self._damaged("has damaged ends of documents")

    def document(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of a document, from 0 to below `documents`."""
        begin = int(self.ends[number - 1]) if number else 0
        return self._data[begin : int(self.ends[number])].astype(np.int64)

    def lengths(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of tokens of these documents."""
        begins = np.where(numbers > 0, self.ends[np.maximum(numbers - 1, 0)], 0)
        return (self.ends[numbers] - begins).astype(np.int64)

    def largest(self) -> int:
        """The largest token, or -1 if there is none. Reads all tokens."""
        step = 1 << 20  # in pieces, so that a mapped file is not held in memory
        return max((int(self._data[b : b + step].max()) for b in range(0, self.tokens, step)), default=-1)

    def verify(self) -> None:
        """Reads all tokens.

        Raises:
            ValueError: they are not those that were written.
        """
        if _checksum(self._data) != self.checksum:
            raise self._damaged("has damaged tokens")

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"[tokens] {self._path} {what}: it is cut, damaged or no token file; make it again")


def _checksum(values: npt.NDArray[np.unsignedinteger]) -> int:
    """In pieces, so that a mapped file is not held in memory."""
    checksum, step = 0, 1 << 20
    for begin in range(0, len(values), step):
        checksum = _core.crc32c(values[begin : begin + step].tobytes(), checksum)
    return checksum
