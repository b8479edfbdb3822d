"""A call's microbatches as an object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from roundpipe.data.batch import Batch, RoundPipePackedData
from roundpipe.model.call.run_config import FullRoundPipeRunConfig, ResolvedRunConfig, RoundPipeRunConfig


class Event:
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def options(**fields: Any) -> ResolvedRunConfig:
    return FullRoundPipeRunConfig(RoundPipeRunConfig(**fields), RoundPipeRunConfig(preserve_rng_state=False))


def packed(*rows: int) -> RoundPipePackedData:
    return RoundPipePackedData([torch.randn(each, 2) for each in rows], [(Event(), Event()) for _ in rows])


@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
def test_cut_and_merged_again(microbatches: int) -> None:
    config = options(num_microbatch=microbatches)
    value, table = torch.randn(6, 2), torch.randn(5)
    batch = Batch((value, "text"), {"table": table, "number": torch.tensor(3)}, config, (torch.arange(6), 7))
    assert batch.num_microbatch == len(batch.flatten_states) == microbatches
    assert torch.equal(torch.cat([label[0] for label in batch.label_list]), torch.arange(6))
    assert all(label[1] == 7 for label in batch.label_list)
    args, kwargs = batch.dump(config)
    assert torch.equal(args[0], value) and args[1] == "text" and kwargs["number"] == 3
    assert torch.equal(kwargs["table"], torch.cat([table] * microbatches))


def test_events_of_packed_arguments_are_handed_on_or_waited_for() -> None:
    value = packed(2, 4)
    batch = Batch((value,), {}, options())
    assert batch.forward_events == [[arrived] for arrived, _ in value.transfer_event]
    assert batch.backward_events == [[gradient] for _, gradient in value.transfer_event]
    args, _ = batch.dump(options(merge_output=False))
    assert args[0].transfer_event == value.transfer_event and len(args[0]) == 2
    assert not any(arrived.waits for arrived, _ in value.transfer_event)
    args, _ = batch.dump(options())
    assert torch.equal(args[0], torch.cat(list(value)))
    assert all(arrived.waits == 1 and not gradient.waits for arrived, gradient in value.transfer_event)


def test_fewer_packed_than_asked_for() -> None:
    with pytest.warns(UserWarning, match="downsizing batch size to 2"):
        batch = Batch((packed(2, 2), packed(1, 1, 1)), {}, options(num_microbatch=5))
    assert batch.num_microbatch == 2


def test_outputs_in_place_of_the_arguments() -> None:
    batch = Batch((torch.ones(4),), {}, options(num_microbatch=2))
    for i in range(2):
        batch.flatten_states[i], batch.flatten_specs[i] = pytree.tree_flatten({"loss": torch.tensor(float(i))})
    assert batch.dump(options(num_microbatch=2))["loss"] == 0.5
