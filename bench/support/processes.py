"""Starts training runs in processes of their own, of our package or of another release of the same name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from support.training_request import Request, Result

import roundpipe

BENCH = Path(__file__).parents[1]
# cuBLAS gives the same bits on every stream only with fixed workspaces.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class RunError(Exception):
    """The run ended without figures; the message is its last line."""

    def __init__(self, message: str, out_of_memory: bool) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


def train(request: Request, peer: Path | None = None, timeout_s: float = 600) -> Result:
    """Runs `request` in a new process.

    Args:
        request: what to train.
        peer: the folder that holds the other release; None: ours.
        timeout_s: after which the process is ended.

    Raises:
        RunError: the process ended without figures.
    """
    package = Path(roundpipe.__file__).parents[1] if peer is None else peer
    path = os.pathsep.join([str(package), str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = _ENVIRONMENT | os.environ | {"PYTHONPATH": path}
    if request.peer:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # it takes every card that it sees
    command = [sys.executable, str(BENCH / "support" / "training_run.py"), json.dumps(asdict(request))]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"no end after {timeout_s:.0f} s", out_of_memory=False) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RunError(lines[-1] if lines else f"exit status {done.returncode}", "OutOfMemoryError" in done.stderr)
    return Result(**json.loads(done.stdout.splitlines()[-1]))
