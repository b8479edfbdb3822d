"""The demo's first proof: a plain loop is refused where the pipeline trains, and both give equal bits."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import roundpipe
from roundpipe import RoundPipeRunConfig, _core
from roundpipe.train.demo.plain_loop import Outcome, next_token_loss, plain_steps, torch_adamw, torch_fuses

STEPS = 3
# Rows of a batch, each its own microbatch: the smallest cut, which leaves a plain loop the most room.
ROWS = 5
# The two numbers of devices that must give the bits of the hand-written loop.
DEVICE_COUNTS = (1, 4)


@dataclass(frozen=True)
class Room:
    """The memory that a plain loop needs, and one device's answer to it.

    Attributes:
        needed_bytes: the loop's peak on the host, where there is room; on accelerators, whose loops hold their own
            temporaries, only weights, gradients and optimizer state.
        limit_bytes: the cap of one device; 0 = it has no cap, and nothing was tried.
        stage: the loop's activity when the device refused; empty if it did not.
        message: the allocator's message; empty if it did not refuse.
    """

    needed_bytes: int
    limit_bytes: int
    stage: str = ""
    message: str = ""

    @property
    def is_refused(self) -> bool:
        return bool(self.message)


@dataclass(frozen=True)
class Comparison:
    """Our steps compared with those of the hand-written loop.

    Attributes:
        devices: the number and kind of devices, in words.
        numbers: how many numbers were compared: losses, weights and, for 16-bit weights, their fp32 masters.
        differing: how many of them differ in any bit.
        largest: the largest absolute difference; nan if a number is missing or not finite.
        where: the name of the tensor with that difference.
    """

    devices: str
    numbers: int
    differing: int = 0
    largest: float = 0.0
    where: str = ""

    @property
    def is_exact(self) -> bool:
        return self.differing == 0


class _OnDevice(nn.Module):
    """Runs the whole plain loop in place of a layer: on the thread of a device, and so under its cap."""

    def __init__(self, llama: PreTrainedModel, batches: Sequence[Tensor], rule: Mapping[str, Any]) -> None:
        super().__init__()
        # In a tuple, because the pipeline would move a submodule's weights; the loop must do that.
        self._loop = (llama, batches, rule)
        self._said: list[tuple[str, str]] = []
        self._stage: list[str] = []

    def forward(self, value: Tensor) -> Tensor:
        # Not raised further: the pipeline would retry with less memory.
        try:
            with torch.enable_grad():
                plain_steps(*self._loop, value.device, on_stage=self._stage.append, adamw=torch_adamw)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            self._said.append((self._stage[-1], str(error).splitlines()[0].split("; ")[0]))
        return value

    @property
    def refusal(self) -> tuple[str, str] | None:
        """The stage and the allocator's message, once it has run; None if all of it fitted."""
        if not self._stage:
            raise RuntimeError("[demo] the plain loop did not run on the device; expected one run; report this")
        return self._said[0] if self._said else None


def training_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that plain training with Adam keeps: weights, gradients, and float32 optimizer state.

    The state is two moments, and a float32 master copy if the weights have a smaller type.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    state = sum(parameter.numel() * (8 if parameter.dtype == torch.float32 else 12) for parameter in model.parameters())
    return {"weights": weights, "gradients": weights, "optimizer state": state}


def measured_plain_steps(
    llama: PreTrainedModel, batches: Sequence[Tensor], rule: Mapping[str, Any], device: torch.device
) -> tuple[Outcome, int]:
    """Runs the hand-written loop without a cap, and returns its peak in bytes if the device is the host.

    On an accelerator, the optimizer's state is on the host, like ours, and weights, gradients and state are counted.
    """
    if device.type == "cpu":
        with _core.MemoryMeter() as meter:
            meter.reset_peak()
            before = meter.current_bytes
            # Torch's: the state of ours is not in torch's allocator, which the meter reads.
            outcome = plain_steps(llama, batches, rule, device, adamw=torch_adamw)
            peak_bytes = meter.peak_bytes - before
        return outcome if torch_fuses() else plain_steps(llama, batches, rule, device), peak_bytes
    # Removes the cap of an earlier pool.
    roundpipe.devices(_specs(roundpipe.devices(), 1, is_capped=False)[0])
    return plain_steps(llama, batches, rule, device, torch.device("cpu")), sum(training_bytes(llama).values())


def try_on_one_device(
    llama: PreTrainedModel,
    batches: Sequence[Tensor],
    rule: Mapping[str, Any],
    pool: roundpipe.DevicePool,
    needed_bytes: int,
) -> Room:
    """Runs one step of the plain loop on one device with the largest cap in `pool`, on that device's thread."""
    limit_bytes = _limit_bytes(pool)
    if not limit_bytes:
        return Room(needed_bytes, 0)
    roundpipe.devices(_specs(pool, 1)[0])
    runner = _OnDevice(llama, batches[:1], rule)
    model = roundpipe.RoundPipe(
        nn.Sequential(runner), name="plain", model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    with torch.no_grad():
        model(torch.zeros(1))
    model.synchronize()
    if runner.refusal is None:
        return Room(needed_bytes, limit_bytes)
    return Room(needed_bytes, limit_bytes, *runner.refusal)


def compare_with_ours(
    llama: PreTrainedModel,
    batches: Sequence[Tensor],
    rule: Mapping[str, Any],
    pool: roundpipe.DevicePool,
    device_count: int,
    expected: Outcome,
) -> Comparison:
    """Runs the same steps in the pipeline on `device_count` devices like those of `pool`, and compares every bit."""
    spec, devices = _specs(pool, device_count)
    roundpipe.devices(spec)
    return compare(our_steps(llama, batches, rule), expected, devices)


def our_steps(llama: PreTrainedModel, batches: Sequence[Tensor], rule: Mapping[str, Any]) -> Outcome:
    """The counterpart of `plain_steps` in the pipeline, with synchronous steps; `llama` stays unchanged."""
    mine = copy.deepcopy(llama)
    config = RoundPipeRunConfig(num_microbatch=len(batches[0]))
    model = roundpipe.wrap_model_to_roundpipe(mine, name="proof", model_run_config=config)
    optimizer = roundpipe.optim.AdamW(model, **rule)
    losses = []
    for batch in batches:
        count = batch[:, 1:].numel()
        losses.append(
            model.forward_backward(
                input_kwargs={"input_ids": batch, "use_cache": False},
                label=batch,
                loss_fn=lambda outputs, tokens, count=count: next_token_loss(outputs.logits, tokens, count),
            )
        )
        model.step(optimizer, is_async=False)
    model.synchronize()
    named = dict(mine.named_parameters())
    state = optimizer.state_dict()["state"]
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {id(parameter): state[index] for index, parameter in enumerate(order)}
    masters = {
        name: _master(parameter, kept[id(parameter)])
        for name, parameter in named.items()
        if parameter.dtype != torch.float32
    }
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return Outcome(torch.stack(losses), weights, masters)


def _master(weight: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    master = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
    _core.join(weight.detach(), state["master_remainder"], master)
    return master


def compare(ours: Outcome, expected: Outcome, devices: str) -> Comparison:
    """Compares every bit of the two. Raises ValueError if they do not have the same tensors."""
    found = Comparison(devices, 0)
    for name, mine, theirs in _pairs(ours, expected):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"[demo] {name} is {mine.dtype} {tuple(mine.shape)}; expected {theirs.dtype} of "
                f"{tuple(theirs.shape)}; compare the same model"
            )
        kind = torch.int32 if mine.dtype == torch.float32 else torch.int16
        differing = int((mine.contiguous().view(kind) != theirs.contiguous().view(kind)).sum())
        largest, where = found.largest, found.where
        if differing:
            difference = float((mine.double() - theirs.double()).abs().max())
            # NaN counts as larger than any number.
            if not where or math.isnan(difference) or difference > largest:
                largest, where = difference, name
        found = Comparison(devices, found.numbers + mine.numel(), found.differing + differing, largest, where)
    return found


def _pairs(ours: Outcome, expected: Outcome) -> list[tuple[str, Tensor, Tensor]]:
    pairs = [("the losses", ours.losses, expected.losses)]
    for what, mine, theirs in (("", ours.weights, expected.weights), ("master of ", ours.masters, expected.masters)):
        if mine.keys() != theirs.keys():
            raise ValueError(
                "[demo] the two models have different parameters; expected the same names; compare the same model"
            )
        pairs += [(what + name, mine[name], theirs[name]) for name in theirs]
    return pairs


def _limit_bytes(pool: roundpipe.DevicePool) -> int:
    """The cap of one device, the largest one if devices differ; 0 = no cap."""
    limits = [int(device["limit_bytes"]) for device in pool.memory_report()]
    return 0 if 0 in limits else max(limits)


def _specs(pool: roundpipe.DevicePool, count: int, is_capped: bool = True) -> tuple[str, str]:
    """`count` devices like those of `pool`, as a spec for `roundpipe.devices` and in words."""
    cards = list(dict.fromkeys(pool.torch_devices))
    limit_bytes = _limit_bytes(pool) if is_capped else 0
    cap = f",memory={limit_bytes}B" if limit_bytes else ""
    if torch.device(cards[0]).type == "cpu":
        return f"virtual:{count}{cap}", "1 device" if count == 1 else f"{count} devices"
    if count == 1:
        return cards[0] + cap, "1 device"
    if len(cards) >= count:
        return ",".join(card + cap for card in cards[:count]), f"{count} devices"
    return f"{cards[0]}x{count}", f"{count} workers that share {cards[0]}"
