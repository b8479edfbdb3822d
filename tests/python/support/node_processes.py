"""Runs functions of `node_programs.py` on several nodes, each a process of a group of gloo. Every node is a fork of one
process, which has imported torch."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Request:
    """What the nodes are to do.

    Attributes:
        size: how many nodes there are.
        program: the name of a function of `node_programs`, or "module:function"; every node calls it.
        arguments: of the function.
        timeout_s: of the process group.
    """

    size: int
    program: str
    arguments: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True)
class Node:
    """How a node ended.

    Attributes:
        status: 0, or 1 after an exception, or minus the number of a signal.
        result: what the function returned.
        errors: what it wrote to stderr.
    """

    status: int
    result: Any
    errors: str


class NodeProcesses:
    """Runs functions on several nodes. Use as a context manager.

    Args:
        environment: of the processes.
        preload: modules that they have imported, beside torch and RoundPipe.
    """

    def __init__(self, environment: Mapping[str, str], preload: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *preload],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> NodeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self, size: int, program: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Node]:
        """How each node ended. A node that stops itself is killed once the others have ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            pickle.dump((folder, Request(size, program, arguments, timeout_s)), self._process.stdin)
            self._process.stdin.flush()
            statuses: list[int] = pickle.load(self._process.stdout)
            return [_node(Path(folder), rank, status) for rank, status in enumerate(statuses)]

    def results(self, size: int, program: str, *arguments: Any) -> list[Any]:
        """What the function returned on each node."""
        nodes = self.end(size, program, *arguments)
        for rank, node in enumerate(nodes):
            assert node.status == 0, f"rank {rank} ended with {node.status}:\n{node.errors}"
        return [node.result for node in nodes]


def _node(folder: Path, rank: int, status: int) -> Node:
    result = folder / f"result-{rank}"
    errors = (folder / f"errors-{rank}").read_text()
    return Node(status, pickle.loads(result.read_bytes()) if result.exists() else None, errors)


def live(folder: Path, rank: int, request: Request) -> int:
    """The life of a node; returns its exit status."""
    import torch

    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=request.size,
        timeout=timedelta(seconds=request.timeout_s),
    )
    module, _, function = request.program.rpartition(":")
    program = getattr(importlib.import_module(module or "node_programs"), function)
    try:
        result = program(*request.arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    return 0


def wait_for(pids: list[int]) -> list[int]:
    """The exit statuses; nodes that have stopped are killed when all others have ended."""
    statuses: dict[int, int] = {}
    stopped: set[int] = set()
    while len(statuses) < len(pids):
        if len(statuses) + len(stopped) == len(pids):
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            stopped.clear()
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            statuses[pid] = os.waitstatus_to_exitcode(status)
    return [statuses[pid] for pid in pids]


def serve() -> None:
    """Forks the nodes of each request on stdin, and writes their exit statuses."""
    import torch._dynamo  # noqa: F401 - by torch.optim, when the first optimizer is made

    for name in ("node_programs", *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()  # a fork that goes through all of them as it ends copies the memory that they are in
    while True:
        try:
            folder, request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pids = []
        for rank in range(request.size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    status = live(Path(folder), rank, request)
                finally:
                    os._exit(status)
            pids.append(pid)
        pickle.dump(wait_for(pids), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.modules["node_processes"] = sys.modules["__main__"]  # what was pickled there is known here
    serve()
