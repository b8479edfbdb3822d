"""Fused kernels on the test card: launched once, late, on the current stream, over memory that is still theirs."""

from __future__ import annotations

import warnings

import pytest
import torch

import roundpipe.ops  # noqa: F401 - makes them known
from roundpipe import _core

card = pytest.importorskip("fake_card", reason="the test card is not on the path; run `make test-card`")
ops = torch.ops.roundpipe


@pytest.fixture(autouse=True)
def nothing_left_over():
    yield
    for index in range(card.device_count()):
        card.synchronize(index)


def numbers(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def launches(function) -> dict[str, int]:
    before = card.launched()
    function()
    return {name: count - before.get(name, 0) for name, count in card.launched().items() if count != before.get(name)}


def test_each_kernel_is_launched_once():
    x, weight = numbers(6, 40, device="card").requires_grad_(), numbers(40, device="card").requires_grad_()
    table = numbers(1, 6, 4, device="card")
    assert launches(lambda: ops.rms_norm(x, weight, 1e-6)) == {"rms_norm_bf16": 1}
    normed = ops.rms_norm(x, weight.float(), 1e-6)
    backward = {"rms_norm_backward_bf16_fp32": 1, "column_sum_fp32": 1}
    assert launches(lambda: normed.sum().backward()) == backward
    total, normed = ops.add_rms_norm(x, x, weight.detach(), 1e-6)
    assert launches(lambda: (total.sum() + normed.sum()).backward()) == {"rms_norm_backward_bf16": 1}
    assert launches(lambda: ops.rotary(x.view(1, 6, 5, 8), table, table).sum().backward()) == {"rotary_bf16": 2}
    gates = {"gate_bf16": 1, "gate_backward_bf16": 1}
    assert launches(lambda: ops.silu_gate(x, x).sum().backward()) == gates
    assert launches(lambda: ops.clamped_gate(x, 1.7, 7.0).sum().backward()) == gates
    labels = torch.arange(6, device="card")
    assert launches(lambda: ops.cross_entropy_(x.detach().half(), labels, -100, True)) == {"cross_entropy_fp16": 1}
    assert launches(lambda: ops.add_wide_(torch.zeros(6, 40, device="card"), x.detach())) == {"add_wide_bf16": 1}
    assert launches(lambda: ops.rms_norm(x[:0], weight, 1e-6)) == {}


def test_a_kernel_runs_after_the_call_has_returned():
    sums, addends = torch.zeros(3000, device="card"), torch.ones(3000, device="card", dtype=torch.float16)
    with card.hold():
        ops.add_wide_(sums, addends)
        assert not card.current_stream().query()
    assert torch.equal(sums.cpu(), torch.ones(3000))


def test_what_a_queued_kernel_reads_is_not_taken_from_it():
    """Copies that an operator makes, and partial sums, are freed before the kernel has begun."""
    x, weight = numbers(300, 128)[:, ::2], numbers(128)[::2]
    given = numbers(300, 64)
    expected_x, expected_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = ops.rms_norm(expected_x, expected_w, 1e-6)
    expected.backward(given)
    on_card = [numbers(300, 128, device="card")[:, ::2], numbers(128, device="card")[::2]]
    leaves = [tensor.requires_grad_() for tensor in on_card]
    late = given.to("card")
    with card.hold():
        normed = ops.rms_norm(*leaves, 1e-6)
        gradients = torch.autograd.grad(normed, leaves, late)
        for _ in range(20):  # takes what is free
            torch.full((300, 64), 7.0, device="card", dtype=torch.bfloat16)
    assert torch.equal(normed.cpu(), expected)
    assert torch.equal(gradients[0].cpu(), expected_x.grad)
    assert torch.equal(gradients[1].cpu(), expected_w.grad)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_streams_and_two_cards(seed: int):
    if card.device_count() < 2:
        pytest.skip("needs two cards")
    x, weight = numbers(50, 1000), numbers(1000)
    expected = ops.silu_gate(ops.rms_norm(x, weight, 1e-6), x)
    found = []
    with card.delays(seed):
        for index in (0, 1):
            place = f"card:{index}"
            here, scale, other = x.to(place), weight.to(place), card.Stream(place)
            normed = ops.rms_norm(here, scale, 1e-6)  # on the current stream of a card that is not the current one
            other.wait_stream(card.current_stream(place))
            with card.stream(other):
                found.append(ops.silu_gate(normed, here))
                normed.record_stream(other)
                here.record_stream(other)
            del normed, here
            card.current_stream(place).wait_stream(other)
            found[-1].record_stream(card.current_stream(place))
        assert torch.accelerator.current_device_index() == 0
    assert [each.device.index for each in found] == [0, 1]
    for each in found:
        assert torch.equal(each.cpu(), expected)


def test_a_kernel_waits_for_what_its_stream_waits_for():
    sums, addends, other = torch.zeros(4, device="card"), torch.zeros(4, device="card"), card.Stream()
    with card.hold():
        addends.add_(5)
        other.wait_stream(card.current_stream())
        with card.stream(other):
            ops.add_wide_(sums, addends)
        assert not other.query()
    other.synchronize()
    assert torch.equal(sums.cpu(), torch.full((4,), 5.0))


def test_a_card_with_a_fault_starts_nothing():
    x = torch.ones(4, 8, device="card")
    with card.fault(), pytest.raises(RuntimeError, match="planted"):
        ops.add_wide_(x, x)


def test_where_no_kernels_run_torchs_operators_do_and_a_warning_says_why_once():
    x, weight = numbers(6, 40, dtype=torch.float32), numbers(40, dtype=torch.float32)

    def values(device: str) -> list[torch.Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        normed = ops.rms_norm(*leaves, 1e-6)
        turned = ops.rotary(normed.view(1, 6, 5, 8), *[torch.ones(1, 6, 4, device=device)] * 2).view(6, 40)
        gated = ops.silu_gate(turned, leaves[0])
        logits = ops.clamped_gate(gated, 1.7, 7.0)
        gradients = torch.autograd.grad(logits.sum(), leaves)
        logits = logits.detach()
        losses = ops.cross_entropy_(logits, torch.arange(6, device=device), -100, True)
        sums = torch.ones(6, 20, device=device)
        ops.add_wide_(sums, logits)
        return [each.detach().cpu() for each in (normed, gated, *gradients, losses, logits, sums)]

    with card.without_kernels("it is a test"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert _core.why_no_kernels("card:0") == "it is a test"
        found: list[torch.Tensor] = []
        assert launches(lambda: found.extend(values("card"))) == {}
        values("card")
    expected = [str(each.message) for each in said if "fused operators" in str(each.message)]
    assert len(expected) == 1 and "run by torch's own on card:0" in expected[0] and "it is a test" in expected[0]
    for plain, fused in zip(found, values("cpu"), strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-5, atol=1e-5)
    with card.without_kernels("it is a test"), pytest.raises(ValueError, match="the dtype is Double"):
        ops.silu_gate(*[torch.ones(2, dtype=torch.float64, device="card")] * 2)


def test_writes_in_place_are_noticed():
    for why in ("", "it is a test"):
        with card.without_kernels(why):
            logits = numbers(2, 5, device="card", dtype=torch.float32).requires_grad_() * 2
            kept = logits.exp()
            with torch.no_grad():
                ops.cross_entropy_(kept, torch.tensor([1, 2], device="card"), -100, True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.sum().backward()
            assert kept._version == 1
