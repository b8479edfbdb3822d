"""Labels that are no labels of the batch's rows are an error before anything runs, in every form that they come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import _Replicate

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.data.packed import RoundPipePackedData

pytestmark = pytest.mark.usefixtures("two_devices")


def squared_error(outputs: Any, label: Any) -> torch.Tensor:
    """Broadcasts, so that nothing else notices."""
    labels = label if isinstance(label, (list, tuple)) else [label]
    values: Any = [(outputs - torch.as_tensor(part, dtype=torch.float32)).square().mean() for part in labels]
    return torch.stack(values).sum()


LABELS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(4, 1),
    "one row": lambda: torch.zeros(1, 1),
    "sequence": lambda: [torch.zeros(4, 1), torch.zeros(4, 1)],
    "one of two": lambda: (torch.zeros(8, 1), torch.zeros(4, 1)),
    "ready": lambda: RoundPipePackedData([torch.zeros(1, 1)] * 4),
}


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("kind", LABELS)
def test_other_rows(kind: str, microbatches: int) -> None:
    label: Any = LABELS[kind]()
    if kind == "ready":
        label = RoundPipePackedData(label[:microbatches])
    model = RoundPipe(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)),
        model_run_config=RoundPipeRunConfig(num_microbatch=microbatches),
    )
    x = torch.randn(8, 3)
    with pytest.raises(ValueError, match=r"\[labels\] .*label.* expected a label for each row"):
        model.forward_backward((x,), label=label, loss_fn=squared_error)
    whole = RoundPipeRunConfig(num_microbatch=microbatches, split_label=_Replicate)
    if kind != "ready":
        model.forward_backward((x,), label=label, loss_fn=lambda outputs, _: outputs.sum(), run_config=whole)
    model.synchronize()


def test_ready_microbatches_of_the_inputs() -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    packed = RoundPipePackedData([torch.randn(1, 3), torch.randn(3, 3)])
    with pytest.raises(ValueError, match=r"label has 6 rows .* the batch has 4, expected a label for each row"):
        model.forward_backward((packed,), label=torch.zeros(6, 1), loss_fn=squared_error)
    seen: list[int] = []

    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(len(label))
        assert outputs.shape == label.shape
        return squared_error(outputs, label)

    model.forward_backward((packed,), label=torch.zeros(4, 1), loss_fn=loss)
    model.synchronize()
    assert sorted(seen) == [1, 3]


def test_a_function_that_cuts_the_inputs_unevenly() -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    config = RoundPipeRunConfig(
        num_microbatch=2, split_input=lambda args, kwargs, n: ([(args[0][:1],), (args[0][1:],)], [kwargs] * 2)
    )
    x, y = torch.randn(4, 3), torch.randn(4, 1)

    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (outputs - label).square().sum()

    expected = loss(model(x), y).detach()
    torch.testing.assert_close(model.forward_backward((x,), label=y, loss_fn=loss, run_config=config), expected)
    with pytest.raises(ValueError, match="label has 3 rows"):
        model.forward_backward((x,), label=y[:3], loss_fn=loss, run_config=config)
    model.synchronize()


def test_labels_among_the_arguments_of_a_model() -> None:
    from causal_models import build, tokens

    wrapped = wrap_model_to_roundpipe(build("llama"))
    batch = {"input_ids": tokens(8), "labels": tokens(4)}
    for options in ({}, {"run_config": RoundPipeRunConfig(num_microbatch=4)}):
        with pytest.raises(ValueError, match=r"kwargs\['labels'\] has 4 rows .* the batch has 8"):
            wrapped.forward_backward(input_kwargs=batch, **options)
    with pytest.raises(ValueError, match="batch_size"):  # as the plain model says
        wrapped.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=1))
    assert roundpipe.devices() is not None
