"""Logits that are not computed yet: what a model does with them happens to them, reading and writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roundpipe.model.losses.lazy_logits import LazyLogits

HIDDEN, WEIGHT = torch.randn(2, 3, 8), torch.randn(11, 8)


def test_lazy_logits_remember_what_a_model_does_with_them() -> None:
    hidden, weight = HIDDEN, WEIGHT
    lazy = LazyLogits.make(hidden, weight, None)
    real = hidden @ weight.T
    capped = torch.tanh(lazy[:, slice(0, None), :] / 3.0) * 3
    assert isinstance(capped, LazyLogits)
    assert capped.steps == (("divide", 3.0), "tanh", ("multiply", 3.0))
    assert (0.5 * lazy).float().steps == (("multiply", 0.5),)  # it is in fp32 already
    half = LazyLogits.make(hidden.bfloat16(), weight.bfloat16(), None)
    assert (0.5 * half).float().steps == (("multiply", 0.5), "float32")
    assert lazy.shape == (2, 3, 11) and lazy.device == hidden.device and lazy.dtype == torch.float32
    torch.testing.assert_close(capped.compute(), torch.tanh(real / 3) * 3)
    for other in (lazy + 1, lazy.argmax(-1), lazy[:, -1], torch.softmax(lazy, -1), lazy * torch.ones(11)):
        assert type(other) is torch.Tensor
    torch.testing.assert_close(lazy + 1, real + 1)


def by_index(logits: Any) -> None:
    logits[:, :, [1, 4]] = -5.0


def by_mask(logits: Any) -> None:
    logits[logits > 0] = 1.0


def by_method(logits: Any) -> None:
    logits.masked_fill_(logits < 0, 2.0)


def by_function(logits: Any) -> None:
    torch.nn.functional.relu(logits, inplace=True)


def by_operator(logits: Any) -> None:
    logits += 3


def as_result(logits: Any) -> None:
    torch.add(logits, 1, out=logits)


def through_a_view(logits: Any) -> None:
    logits[:, 1].zero_()


def through_a_flat_view(logits: Any) -> None:
    logits.view(-1, 11)[:, 3] = 7.0


def through_a_slice(logits: Any) -> None:
    logits[..., 2:5] *= 0.5


def through_its_data(logits: Any) -> None:
    logits.data[0] = 1.0


def through_another_name(logits: Any) -> None:
    logits.float()[:, :, 0] = 9.0


def twice(logits: Any) -> None:
    by_index(logits)
    by_operator(logits)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        *(by_index, by_mask, by_method, by_function, by_operator, as_result, through_a_view, through_a_flat_view),
        *(through_a_slice, through_its_data, through_another_name, twice),
    ],
    ids=lambda write: write.__name__,
)
def test_writes(write: Callable[[Any], None], capped: bool) -> None:
    real = HIDDEN @ WEIGHT.T
    lazy: Any = LazyLogits.make(HIDDEN, WEIGHT, None)
    if capped:
        real, lazy = torch.tanh(real / 3) * 3, torch.tanh(lazy / 3) * 3
    assert isinstance(lazy, LazyLogits)
    write(real)
    write(lazy)
    torch.testing.assert_close(lazy.compute(), real)
    torch.testing.assert_close(lazy * 2, real * 2)
    torch.testing.assert_close(torch.cat([lazy, real]), torch.cat([real, real]))


def test_an_earlier_result_is_not_written_into() -> None:
    lazy: Any = LazyLogits.make(HIDDEN, WEIGHT, None)
    doubled = lazy * 2
    lazy.zero_()
    torch.testing.assert_close(doubled.compute(), HIDDEN @ WEIGHT.T * 2)


def test_attributes_are_those_of_the_logits() -> None:
    weight = WEIGHT.clone().requires_grad_()
    lazy = LazyLogits.make(HIDDEN, weight, None)
    assert lazy.is_cpu and not lazy.is_meta and lazy.get_device() == -1 and lazy.computed is None
    assert lazy.requires_grad and torch.equal(lazy.mT, (HIDDEN @ weight.T).mT)


def test_hidden_states_that_change_meanwhile_are_refused() -> None:
    hidden = HIDDEN.clone()
    lazy = LazyLogits.make(hidden, WEIGHT, None)
    hidden.zero_()
    with pytest.raises(ValueError, match=r"changed in place after the head had read them.*loss_chunk_tokens=None"):
        lazy.compute()
