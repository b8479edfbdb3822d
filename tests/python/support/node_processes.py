"""Runs functions of `node_programs.py` on several nodes, each a process of a group of gloo. Every node is a fork of one
process, which has imported torch."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Network:
    """What connects nodes that do not share this machine's network. The first one serves the store, and each ends as a
    program does, whatever is still out of reach.

    Attributes:
        namespaces: for each node, the file of its network namespace.
        address: of the first node.
        interface: of each node.
    """

    namespaces: tuple[str, ...]
    address: str
    interface: str


@dataclass(frozen=True)
class Request:
    """What the nodes are to do.

    Attributes:
        size: how many nodes there are.
        program: the name of a function of `node_programs`, or "module:function"; every node calls it.
        arguments: of the function.
        timeout_s: of the process group.
        network: None for this machine's.
    """

    size: int
    program: str
    arguments: tuple[Any, ...]
    timeout_s: float = TIMEOUT_S
    network: Network | None = None


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
    """Runs functions on several nodes. Use as a context manager; the process that forks them starts when it is needed.

    Args:
        environment: of the processes.
        preload: modules that they have imported, beside torch and RoundPipe.
    """

    def __init__(self, environment: Mapping[str, str], preload: tuple[str, ...] = ()) -> None:
        self._command = [sys.executable, __file__, *preload]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NodeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: Any) -> Any:
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(self._command, env=self._environment, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except BaseException:  # of a time limit, for example: the answer may still come, but not to the next question
            self._stop()
            raise

    def end(self, size: int, program: str, *arguments: Any) -> list[Node]:
        """How each node ended."""
        (ended,) = self.end_together([Request(size, program, arguments)])
        return ended

    def end_together(self, requests: Sequence[Request]) -> list[list[Node]]:
        """How each node of each request ended. The groups live side by side, so that one waits while another computes.
        A node that stops itself is killed once the others of its group have ended."""
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name, str(index)) for index in range(len(requests))]
            for folder in folders:
                folder.mkdir()
            ended: list[list[int]] = self._ask(list(zip(folders, requests, strict=True)))
            return [
                [_node(folder, rank, status) for rank, status in enumerate(statuses)]
                for folder, statuses in zip(folders, ended, strict=True)
            ]

    def results(self, size: int, program: str, *arguments: Any) -> list[Any]:
        """What the function returned on each node."""
        (results,) = self.results_together([Request(size, program, arguments)])
        return results

    def results_together(self, requests: Sequence[Request]) -> list[list[Any]]:
        """What the function of each request returned on each node; see `end_together`."""
        results = []
        for request, nodes in zip(requests, self.end_together(requests), strict=True):
            for rank, node in enumerate(nodes):
                assert node.status == 0, f"{request}: rank {rank} ended with {node.status}:\n{node.errors}"
            results.append([node.result for node in nodes])
        return results


def silent_ranks(error: str) -> set[int]:
    """The ranks that an error says are missing. Who looks late also misses those that have ended with an error
    of their own."""
    named = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*) (?:did not answer|gives? no sign of life)", error)
    return {int(rank) for each in named for rank in re.findall(r"\d+", each)}


def _node(folder: Path, rank: int, status: int) -> Node:
    result = folder / f"result-{rank}"
    errors = (folder / f"errors-{rank}").read_text()
    return Node(status, pickle.loads(result.read_bytes()) if result.exists() else None, errors)


def move(network: Network, rank: int) -> None:
    """Puts this process, which has a single thread, on the network of a node."""
    with open(network.namespaces[rank]) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace.name}")
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface


def live(folder: Path, rank: int, request: Request) -> int:
    """The life of a node; returns its exit status."""
    import torch

    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        if request.network is not None:
            move(request.network, rank)
            store = f"tcp://{request.network.address}:29500"
        torch.distributed.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=request.size,
            timeout=timedelta(seconds=request.timeout_s),
        )
        torch.distributed.barrier()  # one that ends at once would fail those that still connect to it
        module, _, function = request.program.rpartition(":")
        program = getattr(importlib.import_module(module or "node_programs"), function)
        result = program(*request.arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    return 0


def end(folder: Path, status: int) -> None:
    """Ends this process at once, as all that a program does to end takes longer than most tests."""
    # The store is a file: one that a thread leaves in the middle of a record makes the others read for ever.
    with (folder / "store").open("a") as store:
        fcntl.flock(store, fcntl.LOCK_EX)
        os._exit(status)


def wait_for(groups: list[list[int]]) -> list[list[int]]:
    """The exit statuses; processes that have stopped are killed when all others of their group have ended."""
    statuses: dict[int, int] = {}
    stopped: set[int] = set()
    group_of = {pid: group for group in groups for pid in group}
    while len(statuses) < len(group_of):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        left = [other for other in group_of[pid] if other not in statuses]
        if stopped.issuperset(left):
            for other in left:
                os.kill(other, signal.SIGKILL)
            stopped.difference_update(left)
    return [[statuses[pid] for pid in group] for group in groups]


def serve() -> None:
    """Forks the nodes of the requests on stdin, and writes their exit statuses."""
    import torch._dynamo  # noqa: F401 - by torch.optim, when the first optimizer is made

    for name in ("node_programs", *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()  # a fork that goes through all of them as it ends copies the memory that they are in
    while True:
        try:
            requests = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        groups: list[list[int]] = []
        for folder, request in requests:
            groups.append([])
            for rank in range(request.size):
                pid = os.fork()
                if pid == 0:
                    status = live(folder, rank, request)
                    if request.network is None:
                        end(folder, status)
                    sys.exit(status)
                groups[-1].append(pid)
        pickle.dump(wait_for(groups), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.modules["node_processes"] = sys.modules["__main__"]  # what was pickled there is known here
    serve()
