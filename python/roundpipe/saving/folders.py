"""The run folders that this process writes to."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from roundpipe import _core

_lock = threading.Lock()
_open: dict[str, tuple[tuple[int, int], _core.RunFolder]] = {}  # by real path, with device and inode; guarded by _lock


def run_folder(folder: str | os.PathLike[str]) -> _core.RunFolder:
    """Returns the run folder, made if it is not there, and locked until the process ends.

    Raises:
        RoundPipeError: another process writes to it, or it cannot be written to.
    """
    path = os.path.realpath(folder)
    with _lock:
        try:
            found = os.stat(path)
        except OSError:
            found = None
        place, run = _open.get(path, ((0, 0), None))
        if run is not None and found is not None and place == (found.st_dev, found.st_ino):
            return run
        _open.pop(path, None)  # the folder was removed, or another one is in its place
        run = _core.RunFolder(path)
        for notice in run.notices:
            print(f"[save_checkpoint] {notice}", file=sys.stderr)
        made = os.stat(path)
        _open[path] = ((made.st_dev, made.st_ino), run)
        return run


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in a run folder; None if there is none. Reads only manifests."""
    step = _core.latest_step(os.fspath(folder))
    return None if step is None else Path(folder) / f"step-{step}"
