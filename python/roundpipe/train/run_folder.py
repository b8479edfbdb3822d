"""The folder of a run: what may be there at its start, and what a run that goes on must have kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import roundpipe
from roundpipe import _core
from roundpipe.files import write_text
from roundpipe.train.config import TrainConfig
from roundpipe.train.config_file import read_config, written_config
from roundpipe.train.nodes import RunNodes

CONFIG_FILE = "config.toml"
METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
REPORT_FILE = "report.html"
TENSORBOARD_FOLDER = "tensorboard"
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
DATA_FOLDER = "data"
_RESERVE_FILE = "reserved-for-the-result"
REFERENCE_FILE = "reference.safetensors"
_BEFORE_TRAINING = (CONFIG_FILE, DATA_FOLDER, REFERENCE_FILE, _RESERVE_FILE)


class RunFolder:
    """A run's folder.

    Args:
        config: of the run.
        resume: go on with the run that is there, if one is.
        nodes: of the run, all of which see the folder. Making this is collective; only rank 0 calls what writes.

    Attributes:
        path: the folder.
        goes_on: whether there is a checkpoint to go on from.

    Raises:
        ValueError: the folder cannot be made, holds another run or its result, or a value that belongs to the bits of
            the run to go on with has changed.
    """

    def __init__(self, config: TrainConfig, resume: bool, nodes: RunNodes) -> None:
        self.path = Path(config.out)
        self.result = self.path / (ADAPTER_FOLDER if config.trains_adapters else MODEL_FOLDER)
        self._config = config
        self.goes_on = nodes.first(lambda: self._checked(resume))

    def begin(self) -> None:
        """Makes the folder, and writes the configuration into it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"[train] cannot create {self.path}: {error.strerror}; expected a folder that can be written; choose "
                "another --out"
            ) from None
        write_text(self.path / CONFIG_FILE, written_config(self._config))

    def require_space(self, result_bytes: int, checkpoint_bytes: int) -> None:
        """Raises ValueError unless the disk has room for the result and, if there are to be any, for checkpoints."""
        # A new checkpoint is complete before an old one goes.
        count = self._config.keep + 1 if self._config.save_every is not None else 1
        needed = result_bytes + count * checkpoint_bytes
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise ValueError(
                f"[train] {self.path} has {_core.format_bytes(free)} left, expected {_core.format_bytes(needed)} for "
                f"the result and {count} checkpoint{'s' if count > 1 else ''} of "
                f"{_core.format_bytes(checkpoint_bytes)}; make room, or choose another --out"
            )

    @contextmanager
    def reserved(self, size_bytes: int) -> Iterator[None]:
        """Keeps room on the disk for the result while the block runs or until `release`, whatever else fills it.

        Raises:
            ValueError: there is no room.
        """
        reserve = self.path / _RESERVE_FILE
        try:
            with reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
        except OSError as error:
            self.release()
            raise ValueError(
                f"[train] {self.path} cannot hold the result of {_core.format_bytes(size_bytes)}: {error.strerror}; "
                "make room, or choose another --out"
            ) from None
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Gives the room back, so that the result can be written."""
        (self.path / _RESERVE_FILE).unlink(missing_ok=True)

    def _has_begun(self) -> bool:
        """Whether there is more than what a run leaves that was refused before its first step."""
        return self.path.is_dir() and any(entry.name not in _BEFORE_TRAINING for entry in self.path.iterdir())

    def _checked(self, resume: bool) -> bool:
        """Whether there is a checkpoint to go on from, after what may not be there was refused."""
        try:
            self._check(resume)
        except OSError as error:  # a name that is too long, a folder that may not be read
            raise ValueError(
                f"[train] --out is {str(self.path)[:200]}: {error.strerror}; expected a folder; choose another"
            ) from None
        return resume and self.path.is_dir() and roundpipe.latest(self.path) is not None

    def _check(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"[train] --out is {self.path}, a file, expected a folder; choose another")
        if self.result.exists():
            raise ValueError(
                f"[train] {self.result} holds the result of a run that is complete, expected none; choose another "
                "--out, or move it away"
            )
        stored = self.path / CONFIG_FILE
        if not resume:
            if self._has_begun():
                raise ValueError(
                    f"[train] --out is {self.path}, which is not empty, expected a new folder; choose another, or let "
                    "the run in it go on with --resume"
                )
            return
        if not stored.exists() or not self._has_begun():
            return
        before = TrainConfig(**read_config(stored)).fixed()
        _core.require_same_options(before, self._config.fixed(), f"the run in {self.path}")
