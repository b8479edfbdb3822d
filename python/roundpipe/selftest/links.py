"""Whether bytes arrive as they were sent, on each device's link and in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import RoundPipe
from roundpipe.device.pool import DevicePool
from roundpipe.selftest.checksum import copies, crc32c, majority, weighted_sums
from roundpipe.selftest.finding import Finding
from roundpipe.selftest.placement import on_devices

_DTYPES = (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float16)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
# Small ones are packed with others, and one byte or odd counts are at the edges of every vectorized copy.
_SMALL_BYTES = (1, 3, 67, 4099, 65_537, 1_000_003)
# Of a device's memory, so that a value, its copy and the gradients of a weight fit beside each other.
_SHARE_OF_MEMORY = 12


@dataclass
class _Path:
    """What went one way."""

    tensors: int = 0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, tensor: Tensor, ok: bool) -> None:
        self.tensors += 1
        self.bytes += tensor.nbytes
        if not ok:
            self.wrong.append(f"{str(tensor.dtype).removeprefix('torch.')} of {tensor.nbytes} bytes")

    def finding(self, device: str, what: str) -> Finding:
        counted = f"{self.tensors} tensors, {self.bytes / 1e6:.1f} MB"
        if not self.wrong:
            return Finding(device, "links", what, True, counted)
        detail = f"{len(self.wrong)} of {counted} arrived with other bits, the first: {self.wrong[0]}"
        return Finding(device, "links", what, False, detail, (device,))


class _Echo(nn.Module):
    """Returns the tensors that it gets, and for each what the device sees of it."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        # Clones, so that nobody can hand the host's own memory back.
        return (*(value.clone() for value in values), *(copies(weighted_sums(value)) for value in values))


class _WeightsAsGradients(torch.autograd.Function):
    """One number of fp32, whose gradient for each weight is the weight itself."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(weight.clone() for weight in ctx.saved_tensors)


class _Weights(nn.Module):
    """Says what the device sees of each weight, and sends the weights back as their gradients."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, start: Tensor) -> tuple[Tensor, ...]:
        weights = list(self.weights)
        sent_back = _WeightsAsGradients.apply(*weights)  # type: ignore[no-untyped-call]
        return (start + sent_back, *(copies(weighted_sums(weight)) for weight in weights))


def check_links(pool: DevicePool, device: int, most_bytes: int, rounds: int, seed: int = 0) -> list[Finding]:
    """Sends random bytes to a device and back, as values between layers and as weights and their gradients.

    What came up is judged by a checksum that the device computes of it; what came down, by CRC-32C of the bytes sent,
    or by the device's checksum where other bytes had come up.

    Args:
        most_bytes: of the largest tensor; less if the device's memory is small.
        rounds: how often, each time with new bytes.
    """
    name = list(pool)[device]
    cap = pool.memory_report()[device]["limit_bytes"]
    if cap:
        most_bytes = min(most_bytes, cap // _SHARE_OF_MEMORY)
    generator = torch.Generator().manual_seed(seed)
    sizes = [*(size for size in _SMALL_BYTES if size < most_bytes), most_bytes - 1]
    paths = {what: _Path() for what in ("values up", "values down", "weights up", "gradients down")}
    for turn in range(rounds):
        values = [_random_bytes(size, dtype, generator) for size, dtype in _kinds(sizes, _DTYPES, turn)]
        _echo(pool, device, values, paths)
        weights = [_random_numbers(size, dtype, generator) for size, dtype in _kinds(sizes, _WEIGHT_DTYPES, turn)]
        _weights(pool, device, weights, paths)
    return [path.finding(name, what) for what, path in paths.items()]


def _kinds(sizes: list[int], dtypes: tuple[torch.dtype, ...], turn: int) -> list[tuple[int, torch.dtype]]:
    """Each size as each type; the last, largest one as one type, another each turn."""
    *small, largest = sizes
    both = [*product(small, dtypes), (largest, dtypes[turn % len(dtypes)])]
    return [(max(size, dtype.itemsize), dtype) for size, dtype in both]


def _random_bytes(size_bytes: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits, also those of NaN."""
    count = size_bytes // dtype.itemsize
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _random_numbers(size_bytes: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any sign and mantissa, with exponents of ordinary numbers: sums with nothing keep their bits."""
    bits, exponents, offset = {4: (torch.int32, 0x3F800000, 0x20000000), 2: (torch.int16, 0x3F80, 0x2000)}[
        dtype.itemsize
    ]
    content = _random_bytes(size_bytes, bits, generator)
    return ((content & ~(exponents | 2 * offset)) + offset + (content & exponents)).view(dtype)


def _echo(pool: DevicePool, device: int, values: list[Tensor], paths: dict[str, _Path]) -> None:
    model = RoundPipe(nn.Sequential(_Echo()), name=f"echo of device {device}")
    with torch.no_grad():
        received = model(*values, roundpipe_run_config=on_devices(pool, [device], 1, 1, "forward"))
    model.synchronize()
    for sent, back, sums in zip(values, received[: len(values)], received[len(values) :], strict=True):
        _judge(sent, back, sums, paths["values up"], paths["values down"])


def _weights(pool: DevicePool, device: int, weights: list[Tensor], paths: dict[str, _Path]) -> None:
    sent = [weight.clone() for weight in weights]
    layer = _Weights(weights)
    model = RoundPipe(nn.Sequential(layer), name=f"weights of device {device}", check_loss=False)
    value, *sums = model(torch.zeros(1), roundpipe_run_config=on_devices(pool, [device], 1, 1, "train"))
    value.sum().backward()
    model.synchronize()
    for weight, parameter, seen in zip(sent, layer.weights, sums, strict=True):
        assert parameter.grad is not None
        _judge(weight, parameter.grad, seen, paths["weights up"], paths["gradients down"])


def _judge(sent: Tensor, back: Tensor, sums: Tensor, up: _Path, down: _Path) -> None:
    seen = majority(sums)
    came_up = torch.equal(seen, weighted_sums(sent))
    up.add(sent, came_up)
    down.add(sent, crc32c([back]) == crc32c([sent]) if came_up else torch.equal(weighted_sums(back), seen))
