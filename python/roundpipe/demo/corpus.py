"""Real text found on every machine: the sources of Python's own standard library.

The choice of files depends only on their relative paths and sizes, so the same Python gives the same corpus everywhere.
Whole files are held out, never parts of a training file.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves, `encodings` consists of tables, site-packages differs between machines.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)

# One file out of this many is held out.
HELD_OUT_ONE_IN = 16

# With less training text than this, the demo would learn the files by heart.
LEAST_TRAINING_BYTES = 500_000


@dataclass(frozen=True)
class SourceFile:
    """One text: its path relative to the corpus root, with forward slashes, and its content."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out files; no file is in both."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    @property
    def training_bytes(self) -> int:
        return sum(len(file.text.encode()) for file in self.training)

    @property
    def held_out_bytes(self) -> int:
        return sum(len(file.text.encode()) for file in self.held_out)


def _source_paths(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            # `_sysconfigdata...` is generated and holds this machine's build settings.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _rank(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def load_corpus(root: Path | None = None, limit_bytes: int = 6_000_000) -> Corpus:
    """Reads at most `limit_bytes` of Python sources below `root`, or of the standard library if it is None.

    Files are taken in an order that mixes the folders (by a hash of the relative path); files that are not UTF-8 are
    left out. Raises ValueError if too little text is found.
    """
    folder = root if root is not None else Path(sysconfig.get_path("stdlib"))
    training: list[SourceFile] = []
    held_out: list[SourceFile] = []
    total_bytes = 0
    for path in sorted(_source_paths(folder), key=lambda path: (_rank(path), path)):
        try:
            content = (folder / path).read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip() or total_bytes + len(content) > limit_bytes:
            continue
        total_bytes += len(content)
        chosen = held_out if _rank(path) % HELD_OUT_ONE_IN == 0 else training
        chosen.append(SourceFile(path, text))
    corpus = Corpus(tuple(training), tuple(held_out))
    if corpus.training_bytes < LEAST_TRAINING_BYTES or not held_out:
        raise ValueError(
            f"[demo.corpus] found {total_bytes} bytes of Python sources in {folder}; expected at least "
            f"{LEAST_TRAINING_BYTES}; use a Python whose standard library is installed as .py files"
        )
    return corpus
