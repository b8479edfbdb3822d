"""Whether training through RoundPipe gives the bits of a plain loop, on each device and on all together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe.device.pool import DevicePool
from roundpipe.selftest.checksum import crc32c
from roundpipe.selftest.finding import TOGETHER, Finding
from roundpipe.selftest.kinds import by_kind
from roundpipe.selftest.models import batch_of_tokens, make, model_names, token_loss, wrapped
from roundpipe.selftest.placement import layers_for, on_devices
from roundpipe.selftest.plain_loop import Trained, optimizer_of, train_plainly

_STEPS = 3
_MICROBATCHES = 2


@dataclass(frozen=True)
class _Case:
    """What is trained. `turn` seeds weights and batches."""

    model: str
    dtype: torch.dtype
    is_async: bool
    turn: int

    def __str__(self) -> str:
        kind = "asynchronous" if self.is_async else "synchronous"
        return f"{self.model} {str(self.dtype).removeprefix('torch.')} {kind}"


class TrainingCheck:
    """Compares training on devices of the pool with the plain loop on the device that torch names for them."""

    def __init__(self, pool: DevicePool, rounds: int) -> None:
        self._pool = pool
        self._names = list(pool)
        self._on = [torch.device(device) for device in pool.torch_devices]
        self._expected = functools.cache(self._train_plainly)
        self._checks = [
            [_Case(model, dtype, is_async, turn) for turn in range(rounds)]
            for model in model_names()
            for dtype in (torch.float32, torch.bfloat16)
            for is_async in (False, True)
        ]

    def alone(self, device: int) -> list[Finding]:
        """Trains on this device only."""
        return [self._check([device], cases) for cases in self._checks]

    def together(self) -> list[Finding]:
        """Trains on all devices of a kind at once. Where bits differ, leaves out each, to find the wrong one."""
        groups = [
            [place for place, device in enumerate(self._on) if device in alike] for alike in by_kind(self._on).values()
        ]
        return [self._check(group, cases) for group in groups if len(group) > 1 for cases in self._checks]

    def _check(self, devices: Sequence[int], cases: Sequence[_Case]) -> Finding:
        name = self._names[devices[0]] if len(devices) == 1 else TOGETHER
        what = str(cases[0])
        for case in cases:
            differing = self._differing(devices, case)
            if differing:
                detail = f"{len(differing)} losses and weights are not the plain loop's, the first: {differing[0]}"
                return Finding(name, "training", what, False, detail, self._suspects(devices, case))
        return Finding(name, "training", what, True, f"{len(cases) * _STEPS} steps with the plain loop's bits")

    def _suspects(self, devices: Sequence[int], case: _Case) -> tuple[str, ...]:
        if len(devices) == 1:
            return (self._names[devices[0]],)
        found = [
            left for left in devices if not self._differing([device for device in devices if device != left], case)
        ]
        # With several wrong devices, leaving out one of them is not enough.
        return tuple(self._names[device] for device in found or devices)

    def _differing(self, devices: Sequence[int], case: _Case) -> list[str]:
        """The losses and weights whose bits are not the plain loop's."""
        ours, expected = self._train(devices, case), self._expected(self._on[devices[0]], case)
        return [what for what, checksum in expected.items() if ours[what] != checksum]

    def _start(self, case: _Case) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        model = make(case.model, layers_for(len(self._pool)), case.dtype, case.turn)
        return model, [batch_of_tokens(step, case.turn) for step in range(_STEPS)]

    def _train_plainly(self, on: torch.device, case: _Case) -> dict[str, int]:
        return _checksums(train_plainly(*self._start(case), _MICROBATCHES, on, case.is_async))

    def _train(self, devices: Sequence[int], case: _Case) -> dict[str, int]:
        model, batches = self._start(case)
        pipe = wrapped(model)
        optimizer = optimizer_of(list(pipe.optim_parameters()))

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for step, (tokens, labels) in enumerate(batches):
            # Another device begins each step, so that each runs other stages.
            order = [devices[(place + step) % len(devices)] for place in range(len(devices))]
            config = on_devices(self._pool, order, pipe.num_layers, _MICROBATCHES, "fused")
            losses.append(pipe.forward_backward((tokens,), label=labels, loss_fn=token_loss, run_config=config))
            pipe.step(update, is_async=case.is_async)
        pipe.synchronize()
        return _checksums(Trained(losses, {name: weight.detach() for name, weight in model.named_parameters()}))


def _checksums(trained: Trained) -> dict[str, int]:
    losses = {f"the loss of step {step}": crc32c([loss]) for step, loss in enumerate(trained.losses)}
    return losses | {name: crc32c([weight]) for name, weight in trained.weights.items()}
