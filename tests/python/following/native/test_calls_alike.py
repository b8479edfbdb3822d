"""Programs that microbatches of one form share: calls are recorded once, and the values are each one's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_native_models import batch, gradients, run_plain, wrap

from dense_models import make
from roundpipe.following import parts

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the layer calls that are recorded from here on."""
    seen: list[int] = []
    called = parts.RecordingRun.called

    def noted(self: Any, layer: int, *arguments: Any) -> Any:
        seen.append(layer)
        return called(self, layer, *arguments)

    monkeypatch.setattr(parts.RecordingRun, "called", noted)
    return seen


def other(kind: str, seed: int) -> dict[str, Any]:
    """A batch of the same shape with other tokens."""
    made = batch(kind)
    made["input_ids"] = made["input_ids"].roll(seed, dims=1)
    return made


def test_each_microbatch_has_its_own_values(recorded: list[int]) -> None:
    model = make("llama")
    plain, wrapped = copy.deepcopy(model), wrap(model)
    batches = [other(kind, seed) for seed in range(3) for kind in ("whole", "padded", "packed")]
    batches += [{"input_ids": batches[0]["input_ids"]}, batch("whole", rows=2)]
    batches += [{**batches[1], "num_items_in_batch": count} for count in (7, 9)]
    for arguments in batches:
        mine, theirs = wrapped(**arguments), plain(**arguments, use_cache=False)
        assert torch.equal(mine.logits, theirs.logits)
        assert (mine.loss is None) == (theirs.loss is None)
        assert mine.loss is None or torch.equal(mine.loss, theirs.loss)
    recorded.clear()
    for arguments in batches[:9]:
        plain.zero_grad()
        expected, theirs = run_plain(plain, arguments)
        outputs = wrapped(**arguments)
        outputs.loss.backward()
        wrapped.synchronize()
        assert torch.equal(outputs.loss, expected.loss)
        mine = gradients(model)
        assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())
        wrapped.zero_grad()
    # Two of the three forms were among the latest four before the loop; each is recorded at most once.
    assert len(recorded) <= 3 * model.config.num_hidden_layers


def test_one_recording_serves_all_microbatches(recorded: list[int]) -> None:
    for native, expected in ((True, 2), (False, 2 * 6)):
        wrapped = wrap(make("mistral"), microbatches=3, native=native)
        recorded.clear()
        for _ in range(2):
            wrapped(input_ids=batch("whole")["input_ids"])
        # The recording that finds what the model's end reads is of a whole forward, once.
        assert len(recorded) - 2 == expected, native


def test_masks_of_several_kinds_are_recorded_each_time(recorded: list[int]) -> None:
    model = make("qwen2")
    plain, wrapped = copy.deepcopy(model), wrap(model)
    for seed in range(3):
        recorded.clear()
        arguments = other("padded", seed)
        assert torch.equal(wrapped(**arguments).logits, plain(**arguments, use_cache=False).logits)
        assert len(recorded) >= 2


def test_what_changes_is_recorded_again(recorded: list[int]) -> None:
    model = make("llama")
    wrapped = wrap(model)

    def check() -> None:
        assert torch.equal(wrapped(**batch("padded")).logits, model(**batch("padded"), use_cache=False).logits)

    check()
    recorded.clear()
    check()
    assert not recorded
    model.config._attn_implementation = "eager"  # masks are numbers now, but of the same form
    check()
    model.model.embed_tokens.extra = "an attribute"
    check()
    assert recorded
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"its forward called 1 layers, expected 2"):
        wrapped(**batch("padded"))
