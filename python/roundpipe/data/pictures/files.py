"""Pictures as files: found, read and, where they are part of a record, written."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from roundpipe.data.unusable import UnusableError

_BROKEN = "a picture that cannot be read"
_OF_PNG = ("1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA")


class PictureFiles:
    """Finds the pictures of records, and checks each by reading it whole.

    Args:
        folder: where pictures are written that are part of a record; made when the first one is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def path_of(self, picture: Any, beside: Path | None) -> str:
        """The file of a picture, which stays readable.

        Args:
            picture: a path; bytes of a file; a mapping with "path" or "bytes", as `datasets` has them; one of PIL.
            beside: the folder of the record's file, which relative paths begin at; None: the working folder.

        Raises:
            UnusableError: there is no such file, or it holds no picture that can be read.
        """
        if isinstance(picture, Mapping):
            picture = picture["bytes"] if picture.get("bytes") is not None else picture.get("path")
        if isinstance(picture, bytes):
            return self._checked(self._written(picture), str(self._count))
        if hasattr(picture, "save"):
            return str(self._saved(picture))
        if not isinstance(picture, str | Path):
            detail = f"is a {type(picture).__name__}, expected a path, bytes or one of PIL"
            raise UnusableError("broken", _BROKEN, detail)
        text = str(picture)
        if text.startswith("data:") and ";base64," in text:
            return self.path_of(_decoded(text), beside)
        if "://" in text and not text.startswith("file://"):
            raise UnusableError("broken", "a picture by its address on a network", f"{picture}: expected a file")
        path = Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text)
        found = path if path.is_absolute() or beside is None else beside / path
        found = found if found.is_file() or not path.is_file() else path
        if not found.is_file():
            raise UnusableError("broken", "a picture that is not there", f"{found} is not there")
        return self._checked(found.resolve(), str(picture))

    def _checked(self, path: Path, name: str) -> str:
        read_picture(path, name)
        return str(path)

    def _written(self, content: bytes) -> Path:
        path = self._next("")
        path.write_bytes(content)
        return path

    def _saved(self, picture: Any) -> Path:
        path = self._next(".png")
        try:
            (picture if picture.mode in _OF_PNG else picture.convert("RGB")).save(path)
        except (OSError, ValueError) as error:
            raise UnusableError("broken", _BROKEN, str(error)[:120]) from None
        return path

    def _next(self, suffix: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        self._count += 1
        return self._folder / f"{self._count:08}{suffix}"


def _decoded(address: str) -> bytes:
    try:
        return base64.b64decode(address.partition(",")[2], validate=True)
    except ValueError as error:
        raise UnusableError("broken", _BROKEN, str(error)[:120]) from None


def read_picture(path: str | Path, name: str = "") -> Any:
    """The picture of a file as PIL has it, in RGB and turned as its camera says: as transformers loads pictures.

    Raises:
        UnusableError: it cannot be read.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        return load_image(Image.open(path))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnusableError("broken", _BROKEN, f"{name or path}: {str(error)[:120]}") from None
