"""The process group that a model is trained over, and the groups of its own that RoundPipe makes beside it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from roundpipe import _core

# How many groups were made beside each one: the same number on all of its ranks, since making them is collective.
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def chosen_group(process_group: Any) -> Any:
    """The group to train a model over; None to train it alone.

    Args:
        process_group: a group; None for the default group, if there is one; False for none.

    Raises:
        ValueError: it is something else, or this process is not in it.
    """
    if process_group is False:
        return None
    if process_group is None:
        if "torch.distributed" not in sys.modules or not torch.distributed.is_available():
            return None
        if not torch.distributed.is_initialized():
            return None
        process_group = torch.distributed.group.WORLD
    elif process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "[distributed] process_group is one that this process is not in, expected one that has it; give False to "
            "train alone, or wrap the model only on the group's ranks"
        )
    elif not isinstance(process_group, torch.distributed.ProcessGroup):
        raise ValueError(
            f"[distributed] process_group is a {type(process_group).__name__}, expected a group of torch.distributed, "
            "None for the default group, or False to train alone"
        )
    check_in_use(process_group)
    return process_group if process_group.size() > 1 else None


def timeout_of(group: Any) -> timedelta:
    """The timeout that the group was made with."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    default: timedelta = torch.distributed.constants.default_pg_timeout
    return default


def check_in_use(group: Any) -> None:
    """Raises ValueError if the group was destroyed."""
    if group not in torch.distributed.distributed_c10d._world.pg_map:
        raise ValueError(
            "[distributed] the process group was destroyed, expected one that is in use; wrap the model again after "
            "init_process_group(), or give another group"
        )


def backend_for_tensors_on_the_host(group: Any) -> str:
    """The name of the group's backend for CPU tensors; gloo if it has none, as a group of nccl."""
    known: Mapping[str, str] = torch.distributed.distributed_c10d.BackendConfig(
        torch.distributed.Backend(torch.distributed.get_backend_config(group))
    ).get_device_backend_map()
    found = known.get("cpu")
    return "gloo" if found in (None, "nccl", "undefined") else str(found)


def control_beside(group: Any, timeout: timedelta) -> _core.Control:
    """Short messages between all ranks of a group, over a group of its own. Collective.

    Args:
        group: of the ranks.
        timeout: how long a rank may take to answer.

    Raises:
        ValueError: the group was destroyed.
        RoundPipeError: a rank did not join in.
    """
    return _core.Control(made_beside(group, "gloo", timeout).group_name, timeout.total_seconds())


def made_beside(group: Any, backend: str, timeout: timedelta) -> Any:
    """Makes a new group of the same ranks. Collective.

    Raises:
        ValueError: the group was destroyed.
        RoundPipeError: a rank did not join in.
    """
    check_in_use(group)
    if backend == "gloo" and not torch.distributed.is_gloo_available():
        raise ValueError("[distributed] this torch was built without gloo, expected one that has it; install another")
    try:
        if group is torch.distributed.group.WORLD:
            return torch.distributed.new_group(backend=backend, timeout=timeout)
        return _made_by_its_ranks(group, backend, timeout)
    except RuntimeError as error:
        raise _core.RoundPipeError(
            f"[distributed] a group of {backend} over {group.size()} ranks could not be made within "
            f"{timeout.total_seconds():g} s ({str(error).splitlines()[0]}); every rank has to wrap the same models in "
            "the same order; look at the other ranks' output"
        ) from error


def _made_by_its_ranks(group: Any, backend: str, timeout: timedelta) -> Any:
    """Makes a group of the ranks of `group`, in their order. Collective on these ranks alone.

    torch's `new_group(use_local_synchronization=True)` names it after the number of groups of each process, so that
    ranks that are in unlike numbers of groups wait for each other under unlike names.
    """
    torchs: Any = torch.distributed.distributed_c10d
    ranks = torch.distributed.get_process_group_ranks(group)
    _made[group] = number = _made.get(group, 0) + 1
    made, _ = torchs._new_process_group_helper(
        group.size(),
        group.rank(),
        ranks,
        torch.distributed.Backend(backend),
        torchs._get_default_store(),
        f"{torchs._get_process_group_name(group)}/roundpipe/{number}",
        timeout=timeout,
    )
    torchs._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return made


def try_collectives(group: Any, backend: str) -> None:
    """Tries what a step does, on a few bytes. Collective.

    Raises:
        ValueError: the backend cannot do it, or does something else.
    """
    rank, size = group.rank(), group.size()
    ranks = torch.arange(size, dtype=torch.uint8)
    # Rank r sends r + 1 bytes to each, so that the pieces have unlike sizes.
    sent, received = ranks[rank].repeat(size * (rank + 1)), torch.empty(size * (size + 1) // 2, dtype=torch.uint8)
    parts = [torch.empty(3, dtype=torch.uint8) for _ in range(size)]
    total = torch.full([2], rank, dtype=torch.float64)
    told = ranks[rank].repeat(3)

    def exchange() -> bool:
        torch.distributed.all_to_all_single(received, sent, list(range(1, size + 1)), [rank + 1] * size, group=group)
        return torch.equal(received, ranks.repeat_interleave(ranks.long() + 1))

    def gather() -> bool:
        torch.distributed.all_gather(parts, ranks[rank].repeat(3), group=group)
        return torch.equal(torch.cat(parts), ranks.repeat_interleave(3))

    def add() -> bool:
        torch.distributed.all_reduce(total, group=group)
        return bool((total == size * (size - 1) / 2).all())

    def broadcast() -> bool:
        torch.distributed.broadcast(told, group=group, group_src=0)
        return not told.any()

    for attempt in (exchange, gather, add, broadcast):
        error = None
        try:
            problem = "" if attempt() else "other values arrive"
        except (NotImplementedError, RuntimeError, ValueError) as raised:
            error, problem = raised, str(raised).splitlines()[0]
        if problem:
            raise ValueError(
                f"[distributed] the backend {backend} cannot {attempt.__name__} tensors on the host ({problem}), "
                "expected one that can, such as gloo: torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or "
                "give process_group a group of gloo"
            ) from error
