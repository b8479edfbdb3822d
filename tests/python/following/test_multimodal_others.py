"""What further models of text with pictures and sounds taught: forms that few models have, and their refusals."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from multimodal_others import MIXED, OTHERS
from multimodal_trials import batch_of, prepared, tried
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


@pytest.mark.parametrize(
    ("name", "case", "microbatches"),
    [
        ("GLM-4.1V", "uneven videos", 3),  # whose frames have the token of pictures
        ("Phi-4 multimodal", "uneven sounds", 3),  # whose tokens are in the configs of its towers
        ("Video-LLaVA", MIXED, 1),  # whose code reads hidden states of one tower before it calls the other
        ("BLIP-2", "one picture a row", 1),  # which takes no text alone
        ("Llama 3.2 Vision", "text", 3),  # which has vectors for tokens that are no labels
    ],
)
def test_holds(name: str, case: str, microbatches: int, one_torch_thread: None) -> None:
    found = tried(name, case, "all", microbatches, 2)
    assert found.holds(microbatches), found


def _wrapped(name: str, microbatches: int) -> Any:
    run = RoundPipeRunConfig(num_microbatch=microbatches)
    return wrap_model_to_roundpipe(prepared(OTHERS[name], "all"), model_run_config=run)


@pytest.mark.parametrize("name", ["InstructBLIP", "Kosmos-2"])
def test_a_model_without_a_known_batch_is_refused(name: str, two_devices: None) -> None:
    with pytest.raises(ValueError, match=r"no small batch is known .*use_sequential_preset=False"):
        _wrapped(name, 1)


def test_layers_that_only_pictures_call_are_refused(two_devices: None) -> None:
    wrapped = _wrapped("Llama 3.2 Vision", 1)
    assert wrapped.forward_backward(input_kwargs=batch_of(OTHERS["Llama 3.2 Vision"], "text")) > 0
    wrapped.synchronize()
    with pytest.raises(ValueError, match=r"layers\.1\..*' between its layers, .*use_sequential_preset=False"):
        wrapped.forward_backward(input_kwargs=batch_of(OTHERS["Llama 3.2 Vision"], "one picture a row"))


def test_batch_norm_in_a_tower_is_told(two_devices: None) -> None:
    """Also in one that stays whole, and so has no layer of its own in the pipeline."""
    with pytest.warns(UserWarning, match="has BatchNorm1d, .*set num_microbatch=1"):
        _wrapped("Granite Speech", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _wrapped("Granite Speech", 1)
