"""Which caps a pool's workers put on the cards; what a cap does is tried in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roundpipe.device import card_memory

GB = 10**9


class Backend:
    """The part of a vendor's module that is used, for cards of 10 GB."""

    def __init__(self) -> None:
        self.fractions: dict[str, float] = {}

    def mem_get_info(self, card: torch.device) -> tuple[int, int]:
        return 9 * GB, 10 * GB

    def set_per_process_memory_fraction(self, fraction: float, card: torch.device) -> None:
        self.fractions[str(card)] = fraction


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    backend = Backend()
    monkeypatch.setattr(torch, "get_device_module", lambda card: backend)
    monkeypatch.setattr(card_memory, "_capped", set())
    return backend


def test_workers_of_a_card_share_their_sum_and_a_later_pool_takes_the_cap_back(backend: Backend) -> None:
    card_memory.cap_cards([("cuda:0", 2 * GB), ("cuda:0", 3 * GB), ("cuda:1", 4 * GB)])
    assert backend.fractions == {"cuda:0": 0.5, "cuda:1": 0.4}
    card_memory.cap_cards([("cuda:0", 2 * GB)])
    assert backend.fractions == {"cuda:0": 0.2, "cuda:1": 1.0}
    card_memory.cap_cards([("cpu", 1 * GB)])
    assert backend.fractions == {"cuda:0": 1.0, "cuda:1": 1.0}


def test_a_whole_card_keeps_the_cap_that_the_user_has_set(backend: Backend) -> None:
    card_memory.cap_cards([("cuda:0", 10 * GB)])
    card_memory.cap_cards([("cuda:0", 0)])
    card_memory.cap_cards([("cuda:0", 3 * GB), ("cuda:0", 0)])
    card_memory.cap_cards([("cpu", 0), ("cpu", 0)])
    assert backend.fractions == {}


def test_a_backend_without_such_a_cap_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda card: object())
    card_memory.cap_cards([("xpu:0", 1 * GB)])
    assert not card_memory._capped
