"""The words for what ranks have told each other."""

from __future__ import annotations

from roundpipe.distributed.differences import differences, held, ranks_in_words


def test_ranks_in_words() -> None:
    assert ranks_in_words([2]) == "rank 2"
    assert ranks_in_words([0, 1]) == "ranks 0 and 1"
    assert ranks_in_words([0, 2, 5]) == "ranks 0, 2 and 5"


def test_who_holds_what() -> None:
    assert held(["a", "b", "a"]) == "ranks 0 and 2 have a, rank 1 has b"


def test_only_differences_are_named() -> None:
    told = [{"lr": "0.1", "eps": "1e-8"}, {"lr": "0.2", "eps": "1e-8"}]
    assert differences(told) == "lr: rank 0 has 0.1, rank 1 has 0.2"
    assert differences([told[0], told[0]]) == ""


def test_what_a_rank_does_not_name_it_has_not_got() -> None:
    assert differences([{}, {"layer.bias": "4 float32"}]) == "layer.bias: rank 0 has none, rank 1 has 4 float32"


def test_many_differences_are_counted() -> None:
    told = [{str(i): str(rank) for i in range(7)} for rank in range(2)]
    assert differences(told).endswith("3: rank 0 has 0, rank 1 has 1; and 3 more")
