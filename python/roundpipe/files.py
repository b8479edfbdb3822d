"""Atomic writes of files, JSON and TOML documents, and messages about missing files."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to; at the end, that file replaces `path`, atomically.

    No reader, and no crash, sees half of the file.

    Raises:
        ValueError: the path names no file, or its folder does not exist or cannot be written.
    """
    if not path.name:
        raise ValueError(f"[files] cannot write '{path}': it names no file; expected a file's path")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise ValueError(
            f"[files] cannot write {path}: {error.strerror}; expected a folder that exists and can be written"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def new_folder(out: Path, where: str, size_bytes: int = 0) -> Iterator[Path]:
    """Makes a temporary folder beside `out` and renames it at the end; an exception leaves nothing behind.

    Args:
        out: a folder that does not exist, or is empty.
        where: tags the messages.
        size_bytes: the amount that will be written.

    Raises:
        ValueError: `out` holds files or cannot be made, or its disk has less than `size_bytes` left.
    """
    check_free(out, where)
    temporary = out.parent / f".{out.name}.{os.getpid()}.part"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < size_bytes:
            from roundpipe import _core

            raise ValueError(
                f"[{where}] {out.parent} has {_core.format_bytes(free)} left, expected "
                f"{_core.format_bytes(size_bytes)}; make room, or choose another folder"
            )
        temporary.mkdir()
    except OSError as error:
        raise ValueError(
            f"[{where}] cannot create {out}: {error.strerror}; expected a folder that can be written"
        ) from None
    try:
        yield temporary
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_free(out: Path, where: str) -> None:
    """Raises ValueError unless `out` is an empty folder, or one that can be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"[{where}] {out} {what}, expected a new or empty folder; choose another, or move it away")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`, atomically; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | Path, where: str, kind: str) -> Any:
    """Reads any JSON. `kind` says in messages what the file should be.

    Raises:
        ValueError: tagged with `where`: no such file, no JSON, or JSON nested too deeply to read.
    """
    return _read(path, where, kind, "JSON", json.loads)


def read_toml(path: str | Path, where: str, kind: str) -> Any:
    """Reads any TOML, as `read_json` reads JSON."""
    return _read(path, where, kind, "TOML", tomllib.loads)


def _read(path: str | Path, where: str, kind: str, language: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"[{where}] cannot read {path}: {error.strerror}; expected {kind}") from None
    except RecursionError:
        raise ValueError(f"[{where}] {path} is nested too deeply; expected {kind}") from None
    except ValueError as error:
        raise ValueError(f"[{where}] {path} is not {language}: {error}; expected {kind}") from None


def read_document(path: str | Path, where: str, kind: str, schema: str, version: int) -> dict[str, Any]:
    """Reads a JSON object whose `schema` and `version` are these. `kind` says in messages what the file should be.

    Raises:
        ValueError: tagged with `where`: no such file, no JSON, or another schema or version.
    """
    document = read_json(path, where, kind)
    if not isinstance(document, dict) or (document.get("schema"), document.get("version")) != (schema, version):
        raise ValueError(f"[{where}] {path} has no schema '{schema}' of version {version}; save the plan again")
    return document


def refuse_missing_folder(name_or_path: str | os.PathLike[str], where: str) -> None:
    """Raises ValueError, tagged with `where`, if a path is not a folder; names on the Hub (`owner/model`) pass."""
    text = os.fspath(name_or_path)
    written_as_path = isinstance(name_or_path, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if written_as_path and not Path(text).is_dir():
        raise ValueError(
            f"[{where}] {text} is not a folder, expected one that save_pretrained wrote, or the name of a model on the "
            "Hub"
        )


def first_lines(error: Exception) -> str:
    """The beginning of a message that may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
