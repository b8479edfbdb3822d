"""Starts training runs in processes of their own, of our package or of another release of the same name."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support import compiled
from support.training_request import Lap, LapResult, Ready, Request, Result

import roundpipe

BENCH = Path(__file__).parents[1]
# cuBLAS gives the same bits on every stream only with fixed workspaces.
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


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
    try:
        done = subprocess.run(
            _command("training_run.py", request),
            env=_environment(request, peer),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"no end after {timeout_s:.0f} s", out_of_memory=False) from error
    if done.returncode != 0:
        raise _error(done.stderr, done.returncode)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


class TrainingServer:
    """A process that trains laps as it is asked for them, see training_server.py. Ends with its `with` block.

    From its constructor on it imports what it needs, which several may do at the same time; `set_up` lets it go on.
    """

    def __init__(self, request: Request, folder: Path | None = None, expect: bool = False) -> None:
        """Starts the process.

        Args:
            request: what it trains.
            folder: has packages that come before all others, such as another release of ours; None: ours alone.
            expect: it says the loss of the plain model, too.
        """
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*_command("training_server.py", request), *(["--expect"] if expect else [])],
            env=_environment(request, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,  # what it starts, compilers for example, ends with it
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self, timeout_s: float) -> Any:
        try:
            line = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            self._kill()
            raise RunError(f"stopped: no answer within {timeout_s:.0f} s", out_of_memory=False) from None
        if line is None:
            status = self._process.wait()
            self._stderr.seek(0)
            raise _error(self._stderr.read(), status)
        return json.loads(line)

    def set_up(self, timeout_s: float) -> Ready:
        """Lets the process make its model and optimizer, and blocks until it has. Raises RunError; once only."""
        self._say("set up")
        return Ready(**self._answer(timeout_s))

    def train(self, lap: Lap, timeout_s: float) -> LapResult:
        """Blocks until the lap is over. Raises RunError, after which the process is gone."""
        self._say(json.dumps(asdict(lap)))
        return LapResult(**self._answer(timeout_s))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer tells
            print(line, file=self._process.stdin, flush=True)

    def _kill(self) -> None:
        # Of its own processes alone: the group is made for it.
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._stderr.close()


def _command(program: str, request: Request) -> list[str]:
    return [sys.executable, str(BENCH / "support" / program), json.dumps(asdict(request))]


def _environment(request: Request, folder: Path | None) -> dict[str, str]:
    ours = Path(roundpipe.__file__).parents[1]
    path = [ours if folder is None else folder, BENCH, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = _ENVIRONMENT | compiled.environment() | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    if request.peer:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # it takes every card that it sees
    return environment


def _error(stderr: str, status: int) -> RunError:
    out_of_memory = "OutOfMemoryError" in stderr
    if status < 0:
        return RunError(f"the process was ended by {signal.Signals(-status).name}", out_of_memory)
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return RunError((errors or lines or [f"exit status {status}"])[-1], out_of_memory)
