"""The test card itself: it is late, it forgets what is freed, and nobody but a kernel touches its memory."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

card = pytest.importorskip("fake_card", reason="the test card is not on the path; run `make test-card`")

MIB = 1 << 20
KIB256 = 1 << 18  # blocks of this size are exact


@pytest.fixture(autouse=True)
def nothing_left_over():
    yield
    for index in range(card.device_count()):
        card.synchronize(index)


def run_program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


# --- Lateness


def test_a_kernel_runs_after_the_call_has_returned():
    value = torch.ones(4, device="card")
    other = torch.card.Stream()
    card.synchronize()  # the other stream reads the ones
    with card.hold():
        value.add_(1)
        event = torch.card.Event()
        event.record()
        assert not event.query() and not card.current_stream().query()
        with card.stream(other):
            assert torch.equal(value.clone().cpu(), torch.ones(4))  # another stream does not wait
    event.synchronize()
    assert event.query()
    assert torch.equal(value.cpu(), torch.full((4,), 2.0))


def test_a_stream_waits_for_an_event_of_another():
    value, other, event = torch.ones(4, device="card"), card.Stream(), card.Event()
    with card.hold():
        value.add_(1)
        event.record()
        other.wait_event(event)
        with card.stream(other):
            late = value.clone()
            value.record_stream(other)
        assert not other.query()
    other.synchronize()
    assert torch.equal(late.cpu(), torch.full((4,), 2.0))


def test_time_passes_between_events():
    first, second = card.Event(enable_timing=True), card.Event(enable_timing=True)
    first.record()
    card.occupy(20)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 20


def test_cards_work_side_by_side_and_copies_between_them_wait_for_both():
    with card.hold(card.current_stream(0)):
        first = torch.ones(4, device="card:0")
        second = first.to("card:1")
        assert not card.current_stream(1).query()
        third = torch.ones(4, device="card:1") + second
    assert third.device == torch.device("card:1") and torch.equal(third.cpu(), torch.full((4,), 2.0))


def test_delays_change_no_result():
    def compute() -> torch.Tensor:
        torch.manual_seed(1)
        streams = [card.Stream() for _ in range(3)]
        value = torch.randn(32, 32, device="card")
        for step in range(30):
            streams[step % 3].wait_stream(card.current_stream())
            with card.stream(streams[step % 3]):
                value.record_stream(streams[step % 3])
                changed = torch.tanh(value @ value)
            card.current_stream().wait_stream(streams[step % 3])
            changed.record_stream(card.current_stream())
            value = changed
        return value.cpu()

    expected = compute()
    for seed in (1, 2, 3):
        with card.delays(seed):
            assert torch.equal(compute(), expected)


def test_what_depends_on_data_waits_for_it():
    value = torch.zeros(8, device="card")
    value[2] = 1
    with card.slow(2):
        value.mul_(3)
        assert value.nonzero().tolist() == [[2]]
        value.mul_(2)
        assert value[value > 0].tolist() == [6]
        value.mul_(2)
        assert value.max().item() == 12
        assert torch.unique(value).cpu().tolist() == [0, 12]


# --- Memory


def test_freed_memory_is_reused_at_once_and_written_over_in_order():
    first = torch.ones(1024, device="card")
    second = torch.zeros(1024, device="card")
    place = first.data_ptr()
    with card.hold():
        torch.add(first, 1, out=second)
        del first
        third = torch.empty(1024, device="card")
        assert third.data_ptr() == place
        copied = third.clone()
    assert torch.equal(second.cpu(), torch.full((1024,), 2.0))  # the kernel before was in time
    assert copied.isnan().all().item()


def test_what_another_stream_still_reads_is_lost_without_record_stream():
    other = card.Stream()

    def read_late(record: bool) -> torch.Tensor:
        value = torch.ones(1024, device="card")
        card.synchronize()
        with card.hold(other):
            with card.stream(other):
                late = value.clone()
            if record:
                value.record_stream(other)
            place = value.data_ptr()
            del value
            again = torch.zeros(1024, device="card")
            assert (again.data_ptr() == place) != record
            card.current_stream().synchronize()
        other.synchronize()
        return late.cpu()

    assert torch.equal(read_late(record=True), torch.ones(1024))
    assert torch.equal(read_late(record=False), torch.zeros(1024))


def test_memory_comes_back_when_the_recorded_stream_is_past_it():
    other = card.Stream()
    value = torch.ones(1024, device="card")
    place = value.data_ptr()
    value.record_stream(other)
    with card.hold(other):
        del value
        assert torch.empty(1024, device="card").data_ptr() != place
    other.synchronize()
    taken = [torch.empty(1024, device="card") for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in taken]


def test_the_host_cannot_touch_what_is_on_a_card():
    done = run_program("import ctypes, torch; ctypes.string_at(torch.ones(4, device='card').data_ptr(), 4)")
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_too_much_is_refused_and_the_card_goes_on():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(1 << 50, device="card")
    assert torch.ones(2, device="card").sum().item() == 2


def test_a_cap_holds_and_what_is_cached_makes_room():
    card.synchronize()
    card.empty_cache()
    limit = card.memory_reserved() + 8 * MIB
    card.set_per_process_memory_fraction(limit / card.mem_get_info()[1])
    try:
        kept = torch.empty(6 * MIB, dtype=torch.uint8, device="card")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(6 * MIB, dtype=torch.uint8, device="card")
        del kept
        torch.empty(8 * MIB, dtype=torch.uint8, device="card")  # a segment of another size
    finally:
        card.set_per_process_memory_fraction(1.0)
    assert card.max_memory_reserved() >= limit


def test_statistics():
    card.synchronize()
    before, allocations = card.memory_allocated(), card.memory_stats()["allocation.all.allocated"]
    card.reset_peak_memory_stats()
    value = torch.empty(KIB256, dtype=torch.uint8, device="card")
    more = torch.empty(2 * KIB256, dtype=torch.uint8, device="card")
    assert card.memory_allocated() == before + 3 * KIB256
    del more
    assert card.memory_allocated() == before + KIB256 == before + value.nbytes
    assert card.max_memory_allocated() == before + 3 * KIB256
    assert card.memory_stats()["allocation.all.allocated"] == allocations + 2


# --- Copies


def test_copies_of_page_locked_memory_are_late_and_others_are_not():
    locked = torch.ones(64).pin_memory()
    assert locked.is_pinned() and not torch.ones(64).is_pinned()
    with card.hold():
        up = locked.to("card", non_blocking=True)
        down = torch.zeros(64).pin_memory()
        down.copy_(up, non_blocking=True)
        assert torch.equal(down, torch.zeros(64))
        locked.fill_(2)  # too early, so the card sees it
    card.synchronize()
    assert torch.equal(down, torch.full((64,), 2.0))
    with card.slow(2):
        pageable = torch.ones(64)
        up = pageable.to("card", non_blocking=True)
        pageable.fill_(2)
        assert torch.equal(up.cpu(), torch.ones(64))


def test_page_locked_memory_is_not_reused_before_the_card_is_past_it():
    value = torch.ones(3000).pin_memory()
    place = value.data_ptr()
    with card.hold():
        up = value.to("card", non_blocking=True)
        del value
        assert torch.empty(3000).pin_memory().data_ptr() != place
    assert torch.equal(up.cpu(), torch.ones(3000))


def test_copies_convert_and_follow_strides():
    value = torch.arange(24.0).view(4, 6)
    for blocking in (True, False):
        there = torch.empty(6, 4, dtype=torch.bfloat16, device="card").t()
        there.copy_(value, non_blocking=not blocking)
        back = torch.empty(4, 12, dtype=torch.float64)[:, ::2]
        back.copy_(there, non_blocking=not blocking)
        assert torch.equal(back, value.double())
    assert torch.equal(torch.empty(4, 6, device="card:1").copy_(value[0].to("card:0")).cpu(), value[0].expand(4, 6))


def test_what_is_still_to_be_conjugated_is_copied_as_it_reads():
    value = torch.randn(3, 4, dtype=torch.complex64)
    there = value.to("card")
    assert torch.equal(there.conj().cpu(), value.conj()) and torch.equal(there.conj().clone().cpu(), value.conj())
    assert torch.equal(value.conj().to("card").cpu(), value.conj())
    assert torch.equal(there.conj().imag.cpu(), value.conj().imag)


# --- Operators


def test_a_model_has_the_cpus_bits():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16)
    )
    there = copy.deepcopy(model).to("card")
    inputs = torch.randn(4, 3, 8, 8)
    for one, batch in ((model, inputs), (there, inputs.to("card"))):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False)  # as the CPU's is
        for _ in range(3):
            optimizer.zero_grad()
            one(batch).square().sum().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0, foreach=False)
            optimizer.step()
    for mine, theirs in zip(there.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_agree_with_the_cpu(kind):
    layer, inputs = kind(5, 6, batch_first=True), torch.randn(2, 7, 5)
    there = copy.deepcopy(layer).to("card")
    layer(inputs)[0].square().sum().backward()
    there(inputs.to("card"))[0].square().sum().backward()
    for mine, theirs in zip(there.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_operators_that_write_and_that_make_views():
    value = torch.arange(12.0, device="card")
    assert torch.equal(value.view(3, 4).t()[1].cpu(), torch.tensor([1.0, 5, 9]))
    out = torch.empty(0, device="card")
    torch.add(value, 1, out=out)
    assert out.shape == (12,) and out[11].item() == 12
    value.view(3, 4)[:, 1].mul_(10)
    value[value > 80] = -1
    assert value.tolist() == [0, 10, 2, 3, 4, 50, 6, 7, 8, -1, 10, 11]
    assert [part.tolist() for part in torch.sort(value[:3], descending=True)] == [[10, 2, 0], [1, 2, 0]]
    assert torch.cat([value[:1], value[11:]]).tolist() == [0, 11]
    value.resize_(2, 2)
    assert value.shape == (2, 2)


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="card") + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="card:0") + torch.ones(2, device="card:1")
    assert (torch.ones(2, device="card") * torch.tensor(3.0)).tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_have_the_hosts_bits(dtype: torch.dtype, affine: bool) -> None:
    for norm in (nn.LayerNorm(6, elementwise_affine=affine), nn.GroupNorm(2, 4, affine=affine)):
        found = []
        for device in ("cpu", "card"):
            module = copy.deepcopy(norm).to(device, dtype)
            inputs = torch.linspace(-2, 3, 72).reshape(3, 4, 6).to(device, dtype).requires_grad_()
            module(inputs).square().sum().backward()
            found.append([each.grad.cpu() for each in (inputs, *module.parameters())])
        assert all(map(torch.equal, *found))


def test_autocast():
    layer, inputs = nn.Linear(4, 4).to("card"), torch.ones(2, 4, device="card")
    with torch.autocast("card", dtype=torch.bfloat16):
        product = layer(inputs)
        assert product.dtype == torch.bfloat16 and product.exp().dtype == torch.float32
    assert layer(inputs).dtype == torch.float32


# --- Random numbers


def test_numbers_are_drawn_when_the_operator_is_issued():
    torch.manual_seed(7)
    expected = [torch.randn(5, device="card").cpu() for _ in range(3)]
    torch.manual_seed(7)
    with card.hold():
        first = torch.randn(5, device="card")
        state = card.get_rng_state()
        second = torch.randn(5, device="card")
        card.set_rng_state(state)
        again = torch.randn(5, device="card")
    third = torch.randn(5, device="card")
    for got, wanted in ((first, 0), (second, 1), (again, 1), (third, 2)):
        assert torch.equal(got.cpu(), expected[wanted])


def test_generators():
    mine = torch.Generator("card").manual_seed(3)
    copied = mine.clone_state()
    before = card.get_rng_state()
    assert torch.equal(torch.rand(4, device="card", generator=mine), torch.rand(4, device="card", generator=copied))
    assert torch.equal(card.get_rng_state(), before)
    mine.set_offset(0)
    assert (
        torch.equal(torch.rand(4, device="card", generator=mine), torch.rand(4, device="card", generator=mine)) is False
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="card", generator=torch.Generator())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_again(reentrant):
    def block(value: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(value, 0.5)

    value = torch.ones(64, device="card", requires_grad=True)
    out = checkpoint(block, value, use_reentrant=reentrant)
    after = card.get_rng_state()
    out.sum().backward()
    assert torch.equal(value.grad.cpu(), out.detach().cpu())
    assert torch.equal(card.get_rng_state(), after)


# --- Faults


def test_a_planted_fault_stays():
    value = torch.ones(4, device="card:1")
    card.synchronize(1)  # what is not done yet when a card is lost never is
    with card.fault(1):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"card:1.*planted"):
                value + 1
            with pytest.raises(RuntimeError, match="planted"):
                card.synchronize(1)
            with pytest.raises(RuntimeError, match="planted"):
                value.cpu()
        assert torch.ones(2, device="card:0").sum().item() == 2
    assert value.sum().item() == 4


def test_a_kernel_that_fails_is_a_fault_of_the_card():
    table = torch.ones(4, 2, device="card:1")
    try:
        rows = nn.functional.embedding(torch.tensor([9], device="card:1"), table)
        with pytest.raises(RuntimeError, match=r"aten::embedding|index_select"):
            rows.cpu()
        with pytest.raises(RuntimeError, match="lost to this process"):
            torch.ones(2, device="card:1")
    finally:
        card.forget_fault(1)


# --- Processes


def test_a_process_ends_while_a_card_works():
    text = "import torch; x = torch.ones(4, device='card'); torch.card.occupy(50); [x.add_(1) for _ in range(1000)]"
    done = run_program(text)
    assert done.returncode == 0 and done.stderr == ""


def test_contexts_are_made_by_use_alone():
    text = "import torch; torch.ones(2, device='card:1').cpu(); print(*map(torch.card.has_context, (0, 1)))"
    assert run_program(text).stdout.split() == ["False", "True"]


def test_the_environment_says_what_cards_there_are():
    text = "import torch; print(torch.card.device_count(), torch.card.mem_get_info()[1])"
    done = run_program(text, CARD_COUNT="3", CARD_MEMORY_MIB="64")
    assert done.stdout.split() == ["3", str(64 * MIB)]


def test_threads_have_current_devices_and_streams_of_their_own():
    seen = []

    def look() -> None:
        seen.extend([card.current_device(), card.current_stream(0) == card.default_stream(0)])

    with card.device(1), card.stream(card.Stream(0)):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert card.current_stream(0) != card.default_stream(0)
    assert seen == [0, True]
