"""Models of text with pictures, videos and sounds: the plain model's loss and gradients, however uneven the rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal_models import MODELS
from multimodal_trials import LARGEST, TRAINED, cases_of, prepared, trial, tried
from sweeps import mostly_long, sweep

CASES = [(name, case) for name, model in MODELS.items() for case in cases_of(model)]
SHORT = [
    *[("Gemma 4", "uneven videos"), ("Mistral 3", "uneven pictures"), ("SmolVLM", "uneven pictures")],
    *[("LFM2-VL", "uneven pictures"), ("Qwen3-VL", "uneven pictures"), ("Qwen2-Audio", "uneven sounds")],
]


@sweep("case, trained, microbatches, devices", CASES, TRAINED, [1, 3], [1, 2, 3, 4], ids=str, together=1, short=SHORT)
def test_a_step(case: tuple[str, str], trained: str, microbatches: int, devices: int, one_torch_thread: None) -> None:
    found = tried(*case, trained, microbatches, devices)
    assert found.holds(microbatches), found


def _sizes(least: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 5), min_size=least, max_size=3)
    return st.lists(row, min_size=2, max_size=5)


KINDS = [
    (name, kind)
    for name, model in MODELS.items()
    for kind in ("images", "videos", "sounds")
    if getattr(model, kind) is not None and not model.one_each
]


@pytest.mark.parametrize("pictures", mostly_long(KINDS, ("Qwen2.5-VL", "videos"), ("Gemma 4", "images")), ids=str)
@given(sizes=_sizes(0), microbatches=st.integers(2, 4), devices=st.integers(1, 4))
@settings(max_examples=settings().max_examples // 5 or 1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pictures(
    pictures: tuple[str, str], sizes: Any, microbatches: int, devices: int, one_torch_thread: None
) -> None:
    """Rows with any numbers of pictures, of any sizes."""
    name, kind = pictures
    model = MODELS[name]
    found = trial(prepared(model, "all"), getattr(model, kind)(sizes), min(microbatches, len(sizes)), devices)
    assert abs(found.loss) <= LARGEST and found.gradient <= LARGEST, found
