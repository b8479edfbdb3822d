"""The pool of devices that all models share."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from typing import Any

from roundpipe import _core
from roundpipe.device.card_memory import cap_cards
from roundpipe.device.generators import stand_in

atexit.register(_core.Engine.shut_down)

_has_caps = False  # whether the current pool caps its cards; kept here because every call of a model asks


class DevicePool:
    """The devices that run the stages. Made by `devices()`."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return len(self._engine)

    def __iter__(self) -> Iterator[str]:
        return iter(self._engine.device_names())

    def __repr__(self) -> str:
        return f"DevicePool({self.description!r})"

    @property
    def description(self) -> str:
        """The pool as a spec string, for example "virtual:4,memory=64.00 MiB"."""
        names = self._engine.device_names()
        limits = {self._engine.memory(index).limit_bytes for index in range(len(names))}
        kind = f"virtual:{len(names)}" if names[0].startswith("virtual:") else ",".join(names)
        limit = limits.pop() if len(limits) == 1 else 0
        return f"{kind},memory={_core.format_bytes(limit).replace(' ', '')}" if limit else kind

    @property
    def fp16_accumulation(self) -> bool:
        """Whether products of fp16 matrices on CUDA devices are added up in fp16."""
        return self._engine.fp16_accumulation

    @property
    def torch_devices(self) -> list[str]:
        """Where each device's tensors live for torch, for example "cuda:0"; "cpu" for virtual devices."""
        return list(self._engine.torch_devices())

    @property
    def failed(self) -> dict[str, str]:
        """The devices that have failed, by name, and what each of them did. Calls use the others."""
        return dict(self._engine.failed())

    def restore(self) -> list[str]:
        """Brings the devices back that have failed, between two steps, and returns their names.

        Each is made anew, with an empty memory and without the faults of its spec. The next call uses it.

        Raises:
            RoundPipeError, ValueError, RuntimeError: a device cannot be made; those before it are back.
        """
        return self._engine.restore()

    def inject_fault(self, device: str, fault: str) -> None:
        """Sets a fault of a virtual device, to see what a program does then.

        Args:
            device: its name, for example `"virtual:2"`.
            fault: as in a spec's `fail=`, for example `"error@3"`; the device counts its microbatches from now on.

        Raises:
            ValueError: the pool has no such device, the device is a real one, or this is not a fault.
        """
        names = self._engine.device_names()
        if device not in names:
            raise ValueError(f"[devices] {device!r} is not in the pool, expected one of {', '.join(names)}")
        self._engine.inject(names.index(device), fault)

    def release_hangs(self) -> None:
        """Lets virtual devices go on that hang because of a fault.

        What they compute for calls that have gone on without them is dropped.
        """
        self._engine.release_hangs()

    def memory_report(self) -> list[dict[str, Any]]:
        """Per device: `name`, `limit_bytes` (0 = no cap), `current_bytes`, `peak_bytes`, `resident_bytes`.

        `resident_bytes` are of the frozen weights that stay on the device from job to job, in memory that nothing else
        needs.
        """
        report = []
        for index, name in enumerate(self):
            memory = self._engine.memory(index)
            report.append(
                {
                    "name": name,
                    "limit_bytes": memory.limit_bytes,
                    "current_bytes": memory.current_bytes,
                    "peak_bytes": memory.peak_bytes,
                    "resident_bytes": self._engine.resident_bytes(index),
                }
            )
        return report

    def reset_peak_memory(self) -> None:
        """Restarts `peak_bytes` from the memory in use."""
        self._engine.reset_peak_memory()

    def transfer_report(self) -> list[dict[str, Any]]:
        """Per device, since the pool was made: `name`, `uploaded_bytes`, `downloaded_bytes`, and `classes`.

        `classes` has an entry for each direction ("up", "down") and class of completed transfers, most urgent first:
        `direction`, `kind`, `transfers`, `bytes`, `queued_ms` (from when all data was ready until the first byte moved)
        and `moving_ms` (from then until the last byte had arrived), both summed over the transfers.
        """
        fields = ("direction", "kind", "transfers", "bytes", "queued_ms", "moving_ms")
        report = []
        for index, name in enumerate(self):
            moved = self._engine.moved_bytes(index)
            classes = [{field: getattr(use, field) for field in fields} for use in self._engine.link_use(index)]
            report.append(
                {
                    "name": name,
                    "uploaded_bytes": moved.uploaded_bytes,
                    "downloaded_bytes": moved.downloaded_bytes,
                    "classes": classes,
                }
            )
        return report


def devices(spec: str | Sequence[str] | None = None, *, fp16_accumulation: bool | None = None) -> DevicePool:
    """Sets or returns the pool of devices.

    Args:
        spec: for example `"virtual:4,memory=2GiB,link=8GB/s"`, `"cuda:0,cuda:1"`, `"cuda:0x4"` (four workers that
            share one card), or a list of such parts. None returns the current pool. If there is none yet, it is made
            from the environment variable ROUNDPIPE_DEVICES, else from all accelerators that torch sees, else with as
            many virtual devices as the host has cores. An option applies to the device group before it. `memory=` caps
            a device (for a card, torch's allocator is capped to the sum of its workers' caps, if it supports that).
            `chunk=64MB` limits how much moves at once before a more urgent transfer may go (0: whole layers). `fifo`
            runs transfers in the order of their requests. `watchdog=30s` is the longest time that one microbatch or one
            piece of a copy may take; a device that takes longer has failed (by default there is no limit).
            `resident=2GiB` is the most that frozen weights take which stay on a device with a cap instead of being
            uploaded again; with `resident=0` none stay, and without it as many as find room. Only for
            virtual devices: `link=` GB/s in each direction, `host=` GB/s of all links together, `threads=` CPU threads
            for a device's layers (by default as many as the process uses, which gives the bits of a plain loop),
            `debug` (fills freed device memory with NaN), `fail=` a fault on purpose, for example `fail=error@30` or,
            for device `virtual:2` only, `fail=2:hang@30` (see docs/devices.md).
        fp16_accumulation: whether products of fp16 matrices on CUDA devices are added up in fp16, at twice the rate on
            GeForce cards, with fewer bits (see docs/performance.md). Without it, a new pool does what the environment
            variable ROUNDPIPE_FP16_ACCUMULATION says: 1, or 0 as without one. With it and no spec, the current
            devices are made anew. It is torch's `torch.backends.cuda.matmul.allow_fp16_accumulation`, a switch of the
            whole process: work that runs is waited for before it turns, and it turns back when the next pool is made
            or the engine ends. A call made while the program has it otherwise raises ValueError.

    Raises:
        ValueError: the spec cannot be parsed, or an accelerator in it does not exist.
    """
    global _has_caps
    is_new = spec is not None or fp16_accumulation is not None
    if is_new:
        text = spec if spec is None or isinstance(spec, str) else ",".join(spec)
        engine = _core.Engine.set_current(text, fp16_accumulation)
    else:
        engine = _core.Engine.current()
    if is_new or not _has_caps:
        cap_cards(zip(engine.torch_devices(), engine.memory_caps(), strict=True))
        stand_in(engine.torch_devices())
        _has_caps = True
    return DevicePool(engine)
