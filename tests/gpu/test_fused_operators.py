"""Fused operators on a card have the bits that they have on the host, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundpipe.ops  # noqa: F401 - makes them known
from roundpipe import _core

ops = torch.ops.roundpipe
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# One vector and parts of one, teams of a few lanes, whole blocks, several sweeps.
WIDTHS = [8, 13, 72, 1000, 2048, 5000]


@pytest.fixture
def device(target) -> str:
    """A device that runs kernels."""
    name = f"{target.device}:0" if target.is_card else "cpu"
    if why := _core.why_no_kernels(name):
        if os.environ.get("ROUNDPIPE_REQUIRE_GPU") == "1" and target.device in ("cuda", "card"):
            pytest.fail(why)
        pytest.skip(why)
    return name


def numbers(seed: int, dtype: torch.dtype, *shape: int, strided: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if strided:
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2].to(dtype)
    return torch.randn(*shape, generator=generator).to(dtype)


def results(function: Callable[..., Any], inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Values and gradients, brought to the host."""
    leaves = [tensor.to(device).requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    found = function(*leaves)
    found = list(found) if isinstance(found, tuple | list) else [found]
    given = [numbers(i, each.dtype, *each.shape).to(device) for i, each in enumerate(found)]
    gradients = torch.autograd.grad(found, [leaf for leaf in leaves if leaf.requires_grad], given)
    return [each.detach().cpu() for each in (*found, *gradients)]


def compare(function: Callable[..., Any], inputs: list[torch.Tensor], device: str) -> None:
    for on_card, on_host in zip(results(function, inputs, device), results(function, inputs, "cpu"), strict=True):
        assert on_card.shape == on_host.shape and on_card.dtype == on_host.dtype
        assert torch.equal(bits(on_card), bits(on_host))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


@pytest.mark.kit
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(device: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, y, weight = (numbers(i, dtype, *shape) for i, shape in enumerate([(7, width), (7, width), (width,)]))
        compare(lambda x, w: ops.rms_norm(x, w, 1e-6), [x, weight], device)
        compare(lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6), [x, y, weight.float()], device)
    # More rows than parts of the weight's gradient, and strided ones.
    x, weight = numbers(0, dtype, 2500, 24, strided=True), numbers(1, dtype, 24)
    compare(lambda x, w: ops.rms_norm(x, w, 1e-6), [x, weight], device)


@pytest.mark.kit
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_positions(device: str, dtype: torch.dtype) -> None:
    for width, table in ((64, 64), (64, 32), (18, 9), (18, 18)):
        x, cos, sin = (
            numbers(0, dtype, 2, 5, 3, width, strided=True),
            *(numbers(i, dtype, 1, 5, table) for i in (1, 2)),
        )
        compare(lambda x, cos=cos, sin=sin: ops.rotary(x, cos.to(x.device), sin.to(x.device)), [x], device)


@pytest.mark.kit
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(device: str, dtype: torch.dtype) -> None:
    for shape in ((3,), (5, 2048), (7, 3000)):
        gate, up = numbers(0, dtype, *shape), numbers(1, dtype, *shape, strided=True)
        compare(ops.silu_gate, [4 * gate, up], device)
        compare(ops.silu_gate, [torch.cat([4 * gate, up], -1)], device)
        compare(lambda x: ops.clamped_gate(x, 1.7, 2.0), [2 * torch.cat([gate, up], -1)], device)


@pytest.mark.kit
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cross_entropy_and_sums_in_fp32(device: str, dtype: torch.dtype) -> None:
    for vocabulary in (2, 300, 5001):
        logits = 5 * numbers(0, dtype, 9, vocabulary)
        labels = torch.arange(9) % vocabulary
        labels[3] = -100
        found = []
        for place in (device, "cpu"):
            here = logits.to(place, copy=True)
            losses = ops.cross_entropy_(here, labels.to(place), -100, True)
            sums = torch.ones(9, vocabulary, device=place)
            ops.add_wide_(sums, here)
            found.append([each.cpu() for each in (losses, here, sums)])
        for on_card, on_host in zip(*found, strict=True):
            assert torch.equal(bits(on_card), bits(on_host))


@pytest.mark.kit
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "block", "width"), [("nf4", 64, 72), ("mxfp4", 32, 2048), ("int8", 1000, 1000)])
def test_encoded_numbers(device: str, form: str, block: int, width: int, dtype: torch.dtype) -> None:
    given = numbers(0, dtype, 9, width)
    expected = ops.encode(given, form, block)
    found = ops.encode(given.to(device), form, block)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    decoded = ops.decode(*found, form, block, dtype).cpu()
    assert torch.equal(bits(decoded), bits(ops.decode(*expected, form, block, dtype)))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 1e30, 3e-39])
def test_numbers_at_the_ends(device: str, special: float) -> None:
    x, y = torch.ones(3, 16), torch.full((3, 16), 2.0)
    x[1, 5] = special
    for function in (lambda x, y: ops.rms_norm(x, y[0], 1e-6), ops.silu_gate):
        for on_card, on_host in zip(results(function, [x, y], device), results(function, [x, y], "cpu"), strict=True):
            assert torch.equal(torch.isnan(on_card), torch.isnan(on_host))
            assert torch.equal(bits(on_card.nan_to_num(7.0)), bits(on_host.nan_to_num(7.0)))


def test_tensors_on_two_devices_are_refused(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a card")
    with pytest.raises(ValueError, match=r"got tensors on .* and .*, expected one device"):
        ops.rms_norm(torch.ones(2, 8, device=device), torch.ones(8), 1e-6)
