"""Runs many small programs without importing torch and transformers for each: every one is a fork of one process."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


class ProgramRunner:
    """A process that has imported what programs import, and forks one for each program.

    A program has its own arguments, working directory, environment and end; it cannot change what was read at import.
    Use as a context manager; the fixture `runner` is one for all files.

    Args:
        environment: of the process, and so of the programs.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(
        self, program: Path, *arguments: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """As `environment... python program arguments...` in `cwd`, with what it printed as text."""
        assert self._process.stdin is not None and self._process.stdout is not None
        command = [str(program), *map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("stdout", "stderr")]
            self._process.stdin.write(json.dumps([command, str(cwd or Path.cwd()), environment, *paths]) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(command, status, *(Path(path).read_text() for path in paths))


def redirect(path: str, descriptor: int) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, descriptor)
    os.close(target)


def serve() -> None:
    """Forks a process for each line on stdin, and prints its exit status. The fork returns as the program ends."""
    import torch._dynamo  # noqa: F401 - by torch.optim, when the first optimizer is made
    import transformers

    import roundpipe

    transformers.LlamaForCausalLM, transformers.AutoTokenizer, roundpipe.RoundPipe, roundpipe.devices  # noqa: B018

    gc.freeze()  # a fork that goes through all of them as it ends copies the memory that they are in
    for line in sys.stdin:
        command, cwd, environment, stdout, stderr = json.loads(line)
        child = os.fork()
        if child == 0:
            redirect(os.devnull, 0)
            redirect(stdout, 1)
            redirect(stderr, 2)
            os.chdir(cwd)
            os.environ.update(environment)
            sys.argv = command
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
