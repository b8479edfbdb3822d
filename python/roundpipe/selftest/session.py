"""All checks of a pool, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from roundpipe import RoundPipeError
from roundpipe.device.pool import DevicePool
from roundpipe.selftest.compute import check_compute
from roundpipe.selftest.determinism import deterministic
from roundpipe.selftest.finding import TOGETHER, Finding
from roundpipe.selftest.links import check_links
from roundpipe.selftest.training import TrainingCheck


def selftest(pool: DevicePool, rounds: int, most_bytes: int) -> Iterator[Finding]:
    """Checks links and training of each device of the pool, plain PyTorch where they compute, and all at once.

    Args:
        rounds: how often each check repeats.
        most_bytes: of the largest tensor that travels.
    """
    names = list(pool)
    on = [torch.device(device) for device in pool.torch_devices]
    training = TrainingCheck(pool, rounds)
    with deterministic(any(device.type != "cpu" for device in on)):
        for device, name in enumerate(names):
            yield from _attempt(pool, name, "links", functools.partial(check_links, pool, device, most_bytes, rounds))
        yield from check_compute(list(dict.fromkeys(on)), rounds)
        for device, name in enumerate(names):
            yield from _attempt(pool, name, "training", functools.partial(training.alone, device))
        yield from _attempt(pool, TOGETHER, "training", training.together)


def _attempt(pool: DevicePool, device: str, check: str, run: Callable[[], list[Finding]]) -> list[Finding]:
    """What the check finds. A device that fails in it, or before it, is a finding, too."""
    left_out = pool.failed
    if left_out and device == TOGETHER:
        return []
    if device in left_out:
        return [Finding(device, check, "not run", False, left_out[device].splitlines()[0], (device,))]
    try:
        return run()
    except RoundPipeError as error:
        failed = {name: said for name, said in pool.failed.items() if name not in left_out}
        suspects = tuple(failed or (pool if device == TOGETHER else [device]))
        detail = "; ".join(failed.values()) or str(error)
        return [Finding(device, check, "stopped", False, detail.splitlines()[0], suspects)]
