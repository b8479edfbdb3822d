"""The processes that make one run together: this one alone, or those that torchrun has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch

import roundpipe
from roundpipe import _core
from roundpipe.data.balance import BalancedSplit, rows_of_part
from roundpipe.distributed.groups import control_beside, timeout_of
from roundpipe.distributed.ranks import Ranks
from roundpipe.train.config import TrainConfig

T = TypeVar("T")

# How long rank 0 may read data or write the result while the others wait. One that has ended is noticed at once.
_LONGEST_WORK_OF_FIRST = timedelta(days=1)
_CHOOSE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


class RunNodes:
    """The nodes of a run, which share the rows of each batch; one, for a process that trains alone.

    Every node makes the same calls, in the same order, on the thread that trains.

    Args:
        ranks: of the run.
        patient: the same ranks, with more time to answer; for `first`.

    Attributes:
        rank: this process's number.
        size: how many there are.
        is_first: whether this is rank 0, which writes what is written once.
    """

    def __init__(self, ranks: Ranks, patient: Ranks) -> None:
        self._ranks, self._patient = ranks, patient
        self.rank, self.size = ranks.rank, ranks.size
        self.is_first = self.rank == 0

    @classmethod
    def alone(cls) -> Self:
        """One process."""
        return cls(Ranks.alone(), Ranks.alone())

    def first(self, work: Callable[[], T]) -> T:
        """Returns on every node what `work`, a value of JSON, has returned on rank 0, which alone does it. Collective.

        Raises:
            ValueError: `work` has raised one.
            RoundPipeError: it has raised something else, or a node does not answer.
        """
        found: Any = self._patient.agree(work if self.is_first else lambda: None)[0]
        result: T = found
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
        """Does `work` on each node, and returns what it has returned, a value of JSON, in the order of the ranks.
        Collective.

        Raises:
            ValueError: `work` has raised one on some node.
            RoundPipeError: it has raised something else, or a node does not answer.
        """
        return self._ranks.agree(work)

    def require_same(self, config: TrainConfig) -> None:
        """Collective.

        Raises:
            ValueError: a node has another configuration, beside places and devices; the message names what differs.
        """
        told = self.each(lambda: [(name, repr(value)) for name, value in config.of_all_nodes().items()])
        if what := _core.differences(told):
            raise ValueError(f"[train] the nodes have other options: {what}; expected the same command on all")

    def require_own_devices(self) -> None:
        """Collective.

        Raises:
            ValueError: two processes of one machine use one accelerator.
        """
        if self.size == 1:
            return
        machine = [socket.gethostname(), *(os.environ.get(name, "") for name in _CHOOSE_DEVICES)]
        names = [name for name in roundpipe.devices().torch_devices if torch.device(name).type != "cpu"]
        users: dict[tuple[str, ...], int] = {}
        for rank, used in enumerate(self.each(lambda: [[*machine, name] for name in names])):
            for device in map(tuple, used):
                other = users.setdefault(device, rank)
                if other != rank:
                    raise ValueError(
                        f"[train] ranks {other} and {rank} both use {device[-1]} of {device[0]}, expected one process "
                        "on each machine, which uses all of its devices; start torchrun with --nproc-per-node 1"
                    )

    def rows_of(self, batch: Mapping[str, Any], group: int = 1) -> dict[str, Any] | None:
        """This node's rows of a batch, of which so many stay together; None: it has none."""
        return rows_of_part(batch, self.rank, self.size, group)

    def places_of(self, attention_mask: torch.Tensor) -> list[int]:
        """The places of this node's rows in a batch with this mask: those that `rows_of` gives."""
        if self.size == 1:
            return list(range(len(attention_mask)))
        return BalancedSplit(attention_mask).of_part(self.rank, self.size)


def launched_processes() -> str:
    """How many processes of this run a launcher such as torchrun says that it has started; "1" without one."""
    return os.environ.get("WORLD_SIZE", "1")


@contextmanager
def joined_nodes() -> Iterator[RunNodes]:
    """The nodes of this run: the ranks of the default process group. Under torchrun, the block has one.

    Raises:
        ValueError: the environment says that there are several processes, and not how they find each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield _nodes_of(torch.distributed.group.WORLD)
        return
    size = launched_processes()
    if size == "1":
        yield RunNodes.alone()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"[train] the environment variable WORLD_SIZE is {size}, and {missing[0]} is not set, expected both of "
            "torchrun; start the processes with it, or unset WORLD_SIZE"
        )
    torch.distributed.init_process_group("gloo")
    try:
        yield _nodes_of(torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def _nodes_of(group: Any) -> RunNodes:
    if group.size() == 1:
        return RunNodes.alone()
    usual, patient = (
        Ranks.over(control_beside(group, timeout)) for timeout in (timeout_of(group), _LONGEST_WORK_OF_FIRST)
    )
    return RunNodes(usual, patient)
