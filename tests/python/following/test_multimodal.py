"""Models of text with pictures, videos and sounds: the plain model's loss and gradients, however uneven the rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from multimodal_models import MODELS
from multimodal_trials import LARGEST, MIXED, TRAINED, batch_of, cases_of, prepared, trial, tried
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.following import language_model
from roundpipe.following.picture_trial import other_alone
from roundpipe.following.pictures.splitting import picture_splitting
from sweeps import mostly_long, sweep

CASES = [(name, case) for name, model in MODELS.items() for case in cases_of(model)]
SHORT = [
    *[("Gemma 4", "uneven videos"), ("Mistral 3", "uneven pictures"), ("SmolVLM", "uneven pictures")],
    *[("LFM2-VL", "uneven pictures"), ("Qwen3-VL", MIXED), ("Qwen2-Audio", "uneven sounds")],
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
    # Norms of tiny models can make ten times as much of a last bit, and a search finds the batch that does.
    assert abs(found.loss) <= LARGEST and found.gradient <= 10 * LARGEST, found


def _parts(name: str, kind: str) -> tuple[Any, Any, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """A model, its chain of parts, and a batch of two rows, together and alone."""
    model = prepared(MODELS[name], "all")
    make = getattr(MODELS[name], kind)
    together = make([[1], [2]])
    split = picture_splitting(model.config, together, lambda args, kwargs: kwargs)
    assert split is not None
    alone = list(enumerate(split((), together, 2)[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, wrap_model_to_roundpipe(model)._language_model.chain, together, alone


def test_a_cut_is_confirmed(two_devices: None) -> None:
    model, chain, together, alone = _parts("Qwen2.5-VL", "videos")
    assert other_alone(model, chain, together, alone) is None
    times = {**together, "second_per_grid_ts": together["second_per_grid_ts"][::-1]}
    assert "position" in (other_alone(model, chain, times, alone) or "")
    pixels = {**together, "pixel_values_videos": together["pixel_values_videos"].flip(0)}
    assert other_alone(model, chain, pixels, alone) is not None


def test_a_cut_that_is_not_confirmed_is_refused(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "other_alone", lambda *_: "[1]['position_ids']")
    model = prepared(MODELS["Qwen2.5-VL"], "all")
    run = RoundPipeRunConfig(num_microbatch=2)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=run)
    batch = MODELS["Qwen2.5-VL"].images([[1], [2]])  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"other values than alone .*position_ids.* num_microbatch=1"):
        wrapped.forward_backward(input_kwargs=batch)


def _in_order(value: Any) -> Any:
    """An output with what it holds in the order of their classes' fields, as torch's pytrees make them."""
    return pytree.tree_map(lambda leaf: leaf, value)


@sweep("name, microbatches", MODELS, [1, 3], ids=str, together=1, short=["LLaVA-NeXT", "Qwen3-VL", "Mistral 3"])
def test_outputs(name: str, microbatches: int, two_devices: None) -> None:
    """With one microbatch, the features of pictures are among them; with several, they are left out."""
    case = cases_of(MODELS[name])[-1]
    model = prepared(MODELS[name], "all").eval()
    batch = batch_of(MODELS[name], case)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(**batch)
        wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
        found = wrapped(**batch)
    if microbatches == 1:
        theirs, mine = ({name: of[name] for name in of if name != "cache"} for of in map(_in_order, (expected, found)))
        assert pytree.tree_structure(mine) == pytree.tree_structure(theirs)
        pairs = zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True)
        assert all(one is other or torch.equal(one, other) for one, other in pairs)
        return
    assert not {"image_outputs", "video_outputs"} & {key for key, value in found.items() if value is not None}
    # The positions of padding do not matter, and differ in rows without pictures.
    counted = batch["labels"] != -100
    torch.testing.assert_close(found.logits[counted], expected.logits[counted], rtol=0, atol=1e-5)


def test_tokens_that_are_given_by_place(two_devices: None) -> None:
    """To a model of peft, whose forward names no argument."""
    model = prepared(MODELS["Qwen2.5-VL"], "adapters").eval()
    batch = batch_of(MODELS["Qwen2.5-VL"], "uneven videos")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(**batch).loss
        wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3))
        loss = wrapped(batch.pop("input_ids"), **batch).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
