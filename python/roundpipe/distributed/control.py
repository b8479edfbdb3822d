"""Short messages between all ranks, each to each."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch

from roundpipe import _core
from roundpipe.distributed.differences import ranks_in_words
from roundpipe.distributed.groups import made_beside


class Control:
    """Hands a short message of every rank to every other one. Calling thread only; each rank makes the same exchanges.

    A message travels from rank to rank, not by a collective, so that a rank that does not answer is known by name. An
    exchange that fails, or is interrupted, closes the control: the ranks can no longer agree on anything.

    Args:
        group: of gloo; used for nothing else.
        timeout: how long a rank may take to answer.

    Attributes:
        models: how many models were wrapped over it.
    """

    _FRAME_BYTES: ClassVar[int] = 512
    _LENGTH_BYTES: ClassVar[int] = 4

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._closed: str | None = None
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.models = 0

    @classmethod
    def beside(cls, group: Any, timeout: timedelta) -> Self:
        """A control of the ranks of `group`, over a group of its own. Collective.

        Raises:
            ValueError: the group was destroyed.
            RoundPipeError: a rank did not join in.
        """
        return cls(made_beside(group, "gloo", timeout), timeout)

    @property
    def name(self) -> str:
        """The same on all ranks."""
        return str(self._group.group_name)

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns every rank's message, in the order of the ranks. Ctrl+C ends the wait.

        Raises:
            RoundPipeError: a rank did not answer, in this exchange or in an earlier one.
        """
        if self._closed is not None:
            raise _core.RoundPipeError(self._closed)
        self._closed = (
            "[distributed] an exchange between the nodes was interrupted, so they can no longer agree; start all of "
            "them again from the last checkpoint"
        )
        length = len(message).to_bytes(self._LENGTH_BYTES, "little")
        first = self._FRAME_BYTES - self._LENGTH_BYTES
        frames = self._send_all(length + message[:first].ljust(first, b"\0"), [self._FRAME_BYTES] * self.size)
        sizes = [int.from_bytes(frame[: self._LENGTH_BYTES], "little") for frame in frames]
        heads = [
            frame[self._LENGTH_BYTES : self._LENGTH_BYTES + size] for frame, size in zip(frames, sizes, strict=True)
        ]
        if max(sizes) > first:
            tails = self._send_all(message[first:], [max(size - first, 0) for size in sizes])
            heads = [head + tail for head, tail in zip(heads, tails, strict=True)]
        self._closed = None
        return heads

    def _send_all(self, mine: bytes, sizes: list[int]) -> list[bytes]:
        """Sends `mine` to every other rank, and returns what they have sent, given how much that is."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
        received = {rank: torch.empty(sizes[rank], dtype=torch.uint8) for rank in others}
        failed: dict[int, str] = {}

        def transfer() -> None:
            works: list[tuple[int, Any]] = []
            for rank in others:
                try:
                    if sizes[rank]:
                        works.append((rank, self._group.recv([received[rank]], rank, 0)))
                    if mine:
                        works.append((rank, self._group.send([sent], rank, 0)))
                except RuntimeError as error:  # the connection is known to be broken
                    failed.setdefault(rank, str(error))
            for rank, work in works:
                try:
                    work.wait(self._timeout)
                except RuntimeError as error:
                    failed.setdefault(rank, str(error))

        # On a thread of its own, because gloo's waits do not end at a signal.
        done = threading.Event()

        def run() -> None:
            try:
                transfer()
            finally:
                done.set()

        threading.Thread(target=run, name="roundpipe-control", daemon=True).start()
        done.wait()
        if failed:
            self._refuse_silent(failed)
        return [mine if rank == self.rank else received[rank].numpy().tobytes() for rank in range(self.size)]

    def _refuse_silent(self, failed: dict[int, str]) -> None:
        who = ranks_in_words(sorted(failed))
        reason = failed[min(failed)].splitlines()[0]
        self._closed = (
            f"[distributed] {who} did not answer rank {self.rank} within {self._timeout.total_seconds():g} s, or has "
            f"ended ({reason}); look at its own output, and start all nodes again from the last checkpoint"
        )
        raise _core.RoundPipeError(self._closed)
