"""Reads JSON piece by piece, so that a file may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

_PIECE_CHARACTERS = 1 << 20
_LONGEST_VALUE = 1 << 26  # characters; a list that breaks off would otherwise be read to its end
_ABOUT = frozenset({"version", "name", "title", "description", "license", "source", "url", "split", "language", "date"})
_SPACE = " \t\r\n"


def json_values(file: IO[str]) -> Iterator[tuple[Any, int]]:
    """Yields the values of a list, or values that follow each other, and the line where each begins.

    A single object whose only list of objects is one of its members stands for that list; beside it may be texts about
    the whole, such as a version.

    Raises:
        ValueError: what follows is not JSON; the text begins with the line.
    """
    reader = _Reader(file)
    first = reader.peek()
    if first == "[":
        yield from _elements(reader)
        return
    single = True
    while reader.peek():
        line = reader.line
        value = reader.value()
        if single and not reader.peek():
            yield from _records_in(value, line)
        else:
            yield value, line
        single = False


def _elements(reader: _Reader) -> Iterator[tuple[Any, int]]:
    reader.take("[")
    if reader.peek() == "]":
        reader.take("]")
    else:
        while True:
            reader.peek()
            line = reader.line
            yield reader.value(), line
            if reader.peek() != ",":
                break
            reader.take(",")
        reader.take("]")
    if reader.peek():
        raise ValueError(f"{reader.line} (something follows the list)")


def _records_in(value: Any, line: int) -> Iterator[tuple[Any, int]]:
    if isinstance(value, dict):
        lists = [each for each in value.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
        texts = [name for name, each in value.items() if isinstance(each, str) and name.lower() not in _ABOUT]
        roles = [each for each in lists if {"role", "from"} & each[0].keys()]
        if len(lists) == 1 and not roles and not texts:
            yield from ((each, line) for each in lists[0])
            return
    yield value, line


class _Reader:
    """Takes values from a file of which only a piece is held."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._step(self._at + 1)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"{self.line} (expected {character!r}, found {self.peek() or 'the end'!r})")
        self._step(self._at + 1)

    def value(self) -> Any:
        self.peek()
        wanted = _PIECE_CHARACTERS
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # A number at the very end of what was read may go on.
                if end < len(self._text) or not self._more():
                    self._step(end)
                    return value
            except RecursionError:
                raise ValueError(f"{self.line} (nested too deeply)") from None
            except ValueError as error:
                if len(self._text) > _LONGEST_VALUE or not self._more(wanted):
                    raise ValueError(f"{self.line} ({getattr(error, 'msg', error)})") from None
                wanted *= 2  # or a long value would be tried again too often

    def _step(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _more(self, characters: int = 0) -> bool:
        read = self._file.read(characters or _PIECE_CHARACTERS)
        self._text = self._text[self._at :] + read
        self._at = 0
        return bool(read)
