"""Real text found on every machine: the sources of Python's own standard library, and questions about them.

The choice of files depends only on their relative paths and sizes, so the same Python gives the same corpus everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from roundpipe.files import write_text

# Tests repeat themselves, `encodings` consists of tables, site-packages differs between machines.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)

# With less text than this, the demo would learn the files by heart.
LEAST_BYTES = 500_000

# Short enough for a row of the demo.
_LONGEST_ANSWER = 120


@dataclass(frozen=True)
class SourceFile:
    """One text: its path relative to the corpus root, with forward slashes, and its content."""

    path: str
    text: str


def _source_paths(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            # `_sysconfigdata...` is generated and holds this machine's build settings.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _rank(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def load_corpus(limit_bytes: int, root: Path | None = None) -> list[SourceFile]:
    """Reads at most `limit_bytes` of Python sources below `root`, or of the standard library if it is None.

    Files are taken in an order that mixes the folders (by a hash of the relative path); files that are not UTF-8 are
    left out. Raises ValueError if too little text is found.
    """
    folder = root if root is not None else Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    total_bytes = 0
    for path in sorted(_source_paths(folder), key=_rank):
        try:
            content = (folder / path).read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and total_bytes + len(content) <= limit_bytes:
            total_bytes += len(content)
            files.append(SourceFile(path, text))
    if total_bytes < LEAST_BYTES:
        raise ValueError(
            f"[demo.corpus] found {total_bytes} bytes of Python sources in {folder}; expected at least "
            f"{LEAST_BYTES}; use a Python whose standard library is installed as .py files"
        )
    return files


def write_texts(path: Path, files: Iterable[SourceFile]) -> None:
    """Writes a record for each file."""
    _write_records(path, ({"text": file.text} for file in files))


def write_conversations(path: Path, files: Iterable[SourceFile]) -> None:
    """Writes a record for each function that has a docstring: what does it do?"""
    _write_records(
        path,
        (
            {
                "messages": [
                    {"role": "user", "content": f"What does {name} in {_module(file.path)} do?"},
                    {"role": "assistant", "content": answer},
                ]
            }
            for file in files
            for name, answer in _answers(file)
        ),
    )


def _write_records(path: Path, records: Iterable[dict[str, object]]) -> None:
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def _answers(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Each function's name and the first sentence of its docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the sources: invalid escapes
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        sentence = text.partition(". ")[0].rstrip(".")
        if sentence and len(sentence) <= _LONGEST_ANSWER:
            yield node.name, sentence + "."


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
