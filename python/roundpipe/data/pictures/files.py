"""Pictures, videos and sounds as files: found, read and, where they are part of a record, written."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from roundpipe.data.pictures.content import KIND_OF, Kind, Medium
from roundpipe.data.pictures.sounds import write_sound
from roundpipe.data.unusable import UnusableError

_BROKEN = "a picture that cannot be read"
_OF_PNG = ("1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA")


class PictureFiles:
    """Finds the pictures, videos and sounds of records, and checks each picture by reading it whole.

    Args:
        folder: where pictures are written that are part of a record; made when the first one is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def found(self, medium: Medium, beside: Path | None) -> Medium:
        """The medium with its file, which stays readable.

        Args:
            medium: its place is a path; bytes of a file; a mapping with "path" or "bytes", as `datasets` has them; a
                picture of PIL; a mapping with the "array" and "sampling_rate" of a sound.
            beside: the folder of the record's file, which relative paths begin at; None: the working folder.

        Raises:
            UnusableError: there is no such file, or it holds no picture that can be read.
        """
        kind, picture = KIND_OF[medium.kind], medium.place
        if isinstance(picture, Mapping) and "array" in picture and kind.name == "audio":
            return Medium(kind.name, str(self._sounded(picture)))
        if isinstance(picture, Mapping):
            picture = picture["bytes"] if picture.get("bytes") is not None else picture.get("path")
        if isinstance(picture, bytes):
            return _checked(kind, str(self._written(picture)), str(self._count))
        if hasattr(picture, "save") and kind.name == "image":
            return Medium(kind.name, str(self._saved(picture)))
        if not isinstance(picture, str | Path):
            detail = f"is a {type(picture).__name__}, expected a path, bytes or one of PIL"
            raise UnusableError("broken", f"a {kind.what} that cannot be read", detail)
        text = str(picture)
        if text.startswith("data:") and ";base64," in text:
            return self.found(Medium(kind.name, _decoded(text, kind)), beside)
        if "://" in text and not text.startswith("file://"):
            raise UnusableError("broken", f"a {kind.what} by its address on a network", f"{picture}: expected a file")
        path = Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text)
        found = path if path.is_absolute() or beside is None else beside / path
        found = found if found.is_file() or not path.is_file() else path
        if not found.is_file():
            raise UnusableError("broken", f"a {kind.what} that is not there", f"{found} is not there")
        return _checked(kind, str(found.resolve()), str(picture))

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

    def _sounded(self, sound: Mapping[str, Any]) -> Path:
        """A file of a sound as `datasets` has it, decoded."""
        path = self._next(".wav")
        try:
            write_sound(path, sound["array"], int(sound["sampling_rate"]))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise UnusableError("broken", "a sound that cannot be read", str(error)[:120]) from None
        return path

    def _next(self, suffix: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        self._count += 1
        return self._folder / f"{self._count:08}{suffix}"


def _checked(kind: Kind, path: str, name: str) -> Medium:
    if kind.name == "image":
        read_picture(path, name)
    return Medium(kind.name, path)


def _decoded(address: str, kind: Kind) -> bytes:
    try:
        return base64.b64decode(address.partition(",")[2], validate=True)
    except ValueError as error:
        raise UnusableError("broken", f"a {kind.what} that cannot be read", str(error)[:120]) from None


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
