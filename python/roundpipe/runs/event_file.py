"""Event files that TensorBoard reads. The format is a few lines, so the package is not needed to write it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_MASK = 0xA282EAD8


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli's polynomial."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


class EventFile:
    """Scalars of one run.

    Args:
        folder: TensorBoard's `--logdir`, or a folder in it; made if it is not there.
        time_s: of the file's beginning; None: now.
    """

    def __init__(self, folder: Path, time_s: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time() if time_s is None else time_s
        name = f"events.out.tfevents.{int(began)}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._add(struct.pack("<Bd", 0x09, began) + _bytes(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float], time_s: float | None = None) -> None:
        """Appends scalars of a step, by tag."""
        now = time.time() if time_s is None else time_s
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + struct.pack("<Bf", 0x15, value)) for tag, value in values.items()
        )
        self._add(struct.pack("<Bd", 0x09, now) + b"\x10" + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    """A field of a protocol buffer that has a length."""
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _masked(data: bytes) -> bytes:
    """The checksum as records keep it."""
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF)
