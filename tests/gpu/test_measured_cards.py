"""What `roundpipe plan --measure` measures on a card."""

from __future__ import annotations

from roundpipe.plan.measure import measure

MEMORY = 500_000_000
LAYER = 2_000_000


def test_every_figure_is_measured(target):
    machine = measure(target.pool(2, MEMORY), rounds=1, layer_bytes=LAYER)
    assert len(machine.devices) == 2
    assert [memory for _, memory in machine.devices] == [MEMORY] * 2
    assert max(speed for speed, _ in machine.devices) == 1.0
    assert machine.rates["link_up_gb_per_s"] > 0
    assert machine.rates["link_down_gb_per_s"] > 0
    assert machine.update_gb_per_s > 0


def test_without_a_cap_a_card_says_what_it_has(target):
    machine = measure(target.pool(1), rounds=1, layer_bytes=LAYER)
    ((speed, memory),) = machine.devices
    assert speed == 1.0
    assert (memory > 0) == target.is_card
    # One device's links are the host's.
    assert machine.rates["host_gb_per_s"] >= 0
