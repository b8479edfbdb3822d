"""Writes token files, see `docs/token-files.md`."""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from roundpipe import _core
from roundpipe.files import replacing

_HEADER_BYTES = 64
_MAX_TOKENS_OF_2_BYTES = 1 << 16
_MAX_VOCABULARY = (1 << 31) - 1


class TokenWriter:
    """Appends documents to a token file; made by `token_file`.

    Attributes:
        tokens: the number of tokens so far.
        documents: the number of documents so far.
    """

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self._file = file
        self._vocabulary = vocabulary
        self._kind = "H" if vocabulary <= _MAX_TOKENS_OF_2_BYTES else "I"
        self._ends = array("Q")
        self._checksum = 0
        self.tokens = 0
        file.write(bytes(_HEADER_BYTES))  # no reader takes it

    @property
    def documents(self) -> int:
        return len(self._ends)

    def append(self, document: Sequence[int]) -> None:
        """Appends a document.

        Raises:
            ValueError: it is empty, or has a token outside of the vocabulary.
        """
        if not document:
            raise ValueError("[tokens] a document is empty, expected at least one token; leave it out")
        if min(document) < 0 or max(document) >= self._vocabulary:
            raise ValueError(
                f"[tokens] a document has tokens from {min(document)} to {max(document)}, expected 0 to "
                f"{self._vocabulary - 1}, the tokenizer's vocabulary"
            )
        data = _little_endian(array(self._kind, document))
        self._file.write(data)
        self._checksum = _core.crc32c(data, self._checksum)
        self.tokens += len(document)
        self._ends.append(self.tokens)

    def finish(self) -> None:
        """Writes what follows the tokens, and then the header.

        Raises:
            ValueError: there are no documents.
        """
        if not self._ends:
            raise ValueError("[tokens] there are no documents, expected at least one")
        ends = _little_endian(self._ends)
        size = array(self._kind).itemsize
        self._file.write(bytes(-self.tokens * size % 8))
        self._file.write(ends)
        numbers = (size, self.tokens, self.documents, self._vocabulary, self._checksum, _core.crc32c(ends))
        header = struct.pack("<8sIIQQQII12x", b"RPTOKENS", 1, *numbers)
        self._file.seek(0)
        self._file.write(header + struct.pack("<I", _core.crc32c(header)))


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


@contextmanager
def token_file(path: str | Path, vocabulary: int) -> Iterator[TokenWriter]:
    """Gives a writer of a token file that replaces `path` at the end, whole; an exception leaves nothing behind.

    Args:
        path: the file.
        vocabulary: every token is smaller than this number.

    Raises:
        ValueError: the vocabulary is no positive number below 2^31, the file cannot be written, or no document was
            appended.
    """
    if not 0 < vocabulary <= _MAX_VOCABULARY:
        raise ValueError(f"[tokens] vocabulary is {vocabulary}, expected a number from 1 to {_MAX_VOCABULARY}")
    with replacing(Path(path)) as temporary, open(temporary, "w+b") as file:
        writer = TokenWriter(file, vocabulary)
        yield writer
        writer.finish()
        file.flush()
        os.fsync(file.fileno())
