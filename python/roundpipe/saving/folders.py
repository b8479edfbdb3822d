"""The run folders that this process writes to."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from roundpipe import _core
from roundpipe.step.group import RunningSave

_lock = threading.Lock()
_saves: dict[str, RunningSave] = {}  # by real path; guarded by _lock
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


def note_save(path: str, save: RunningSave) -> None:
    """Notes the last save into a run folder, given by its real path."""
    with _lock:
        _saves[path] = save


def wait_for_saves(folder: str | os.PathLike[str]) -> None:
    """Waits for the last save of this process into a run folder, given by itself or by a checkpoint in it."""
    path = os.path.realpath(folder)
    with _lock:
        found = [_saves.get(path), _saves.get(os.path.dirname(path))]
    for save in found:
        if save is not None:
            save.wait_over()


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in a run folder; None if there is none. Reads only manifests.

    Raises:
        RoundPipeError: there are checkpoints, and none is complete: a training that began anew beside them would lose
            them.
    """
    found = _core.latest(os.fspath(folder))
    return None if found is None else Path(found)
