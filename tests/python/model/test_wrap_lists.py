"""Elements of an `nn.ModuleList` wrapped part by part: code between them means what it means in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.data.microbatch import merge_what_fits
from roundpipe.data.packed import RoundPipePackedData

WIDTH, ROWS = 8, 5


class Layer(nn.Module):
    """Hidden states [batch, WIDTH] -> the same shape, alone or with others: `returned` makes them of the states."""

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.linear(x).tanh())


Between = Callable[[Any, torch.Tensor], torch.Tensor]


def alone(h: torch.Tensor) -> Any:
    return h


def pair(h: torch.Tensor) -> Any:
    return h, 2 * h


def changed_in_place(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h += x
    return h


def shape_read(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(h, torch.Tensor) and h.shape == x.shape and len(h) == ROWS
    return h


def watched(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: 3 * gradient)
    return h


WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Between]] = {
    "passed_on": (alone, lambda h, x: h),
    "residual": (alone, lambda h, x: h + x),
    "residual_first": (alone, lambda h, x: x + h),
    "method": (alone, lambda h, x: h.tanh()),
    "function": (alone, lambda h, x: nn.functional.layer_norm(h, (WIDTH,))),
    "first_row": (alone, lambda h, x: h[0] + x),
    "rows": (alone, lambda h, x: torch.stack([2 * row for row in h])),
    "concatenated": (alone, lambda h, x: torch.cat([h[:, : WIDTH // 2], x[:, WIDTH // 2 :]], 1)),
    "in_place": (lambda h: h + 0, changed_in_place),
    "shape": (alone, shape_read),
    "hook": (alone, watched),
    "first_of_tuple": (pair, lambda h, x: h[0]),
    "unpacked": (pair, lambda h, x: (lambda a, b: a * b)(*h)),
    "dict": (lambda h: {"h": h, "none": None}, lambda h, x: h["h"]),
    "same_for_all_rows": (lambda h: (h, torch.arange(WIDTH)[None]), lambda h, x: h[0] * h[1]),
    "number": (lambda h: (h, 2), lambda h, x: h[0] * h[1]),
    "mean": (lambda h: (h, h.new_tensor(2.0)), lambda h, x: h[0] * h[1]),
}


class Model(nn.Module):
    def __init__(self, returned: Callable[[torch.Tensor], Any], between: Between) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(returned) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            if layer:
                x = self.between(layer(x), x)
        return self.head(x)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_code_between_elements(way: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model = Model(*WAYS[way])
    plain = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = plain(x)
    expected.square().mean().backward()
    wrapped = wrap_model_to_roundpipe(
        model, lower_threshold=0, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches)
    )
    assert isinstance(model.layers[0], roundpipe.RoundPipe)
    outputs = wrapped(x)
    outputs.square().mean().backward()
    wrapped.synchronize()
    torch.testing.assert_close(outputs, expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Sums over the rows are made in another order.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_handed_on() -> None:
    class Length(nn.Module):
        """Counts the rows it sees."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, length: str | None) -> Any:
            assert length is None or length == f"{len(x)} rows"
            return self.linear(x), f"{len(x)} rows"

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Length() for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            x, length = self.layers[0](x, None)
            return self.layers[1](x, length)[0]

    torch.manual_seed(0)
    model = Root()
    x = torch.randn(4, WIDTH)
    expected = model(x)
    wrapped = wrap_model_to_roundpipe(model, lower_threshold=0, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    torch.testing.assert_close(wrapped(x), expected)


def test_merge_what_fits() -> None:
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    outputs = [(part, torch.ones(1, 4), f"{i}", 7) for i, part in enumerate(parts)]
    merged, same, names, number = merge_what_fits(outputs)
    assert torch.equal(merged, torch.cat(parts)) and torch.equal(same, torch.ones(1, 4)) and number == 7
    assert isinstance(names, RoundPipePackedData) and names == ["0", "1"]
    assert merge_what_fits([torch.ones(1, 4), torch.ones(1, 4)]).shape == (2, 4)  # a row for each microbatch
    assert merge_what_fits([1, (2,)]) == [1, (2,)] and merge_what_fits([(1, "a")]) == (1, "a")
