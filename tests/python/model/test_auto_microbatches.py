"""`num_microbatch="auto"`, whose choice is C++'s."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig

AUTO = RoundPipeRunConfig(num_microbatch="auto")


def model_of(config: RoundPipeRunConfig | None = AUTO, layers: int = 8, **options: object) -> RoundPipe:
    chain = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    return RoundPipe(chain, name="chain", model_run_config=config, **options)  # type: ignore[arg-type]


def train(model: RoundPipe, rows: int, config: RoundPipeRunConfig | None = None) -> int:
    """The number of microbatches of one step."""
    model.forward_backward((torch.ones(rows, 16),), loss_fn=lambda outputs, _: outputs.sum(), run_config=config)
    model.synchronize()
    plan = model.last_plan()
    assert plan is not None
    return plan.microbatches


@pytest.mark.usefixtures("two_devices")
def test_it_is_chosen_once_and_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    assert model.auto_microbatches is None
    first = train(model, 32)
    said = capsys.readouterr().err
    assert f'num_microbatch="auto" of chain is {first} (' in said and "estimated costs" in said
    assert model.auto_microbatches == first > 1
    for rows in (32, 64, 32):
        assert train(model, rows) == first
    assert train(model, 1) == 1  # a batch cannot have more microbatches than rows
    assert model.auto_microbatches == first
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("one_device")
def test_one_call_may_ask_for_it_and_a_resumed_run_has_its_own() -> None:
    model = model_of(None)
    fixed = train(model, 32)
    assert fixed == 2  # devices + 1
    with torch.no_grad():
        model(torch.ones(2, 16), roundpipe_run_config=AUTO)
    assert model.auto_microbatches is None  # evaluation does not choose
    model.auto_microbatches = 5
    assert train(model, 32, AUTO) == 5
    assert train(model, 32) == fixed


@pytest.mark.usefixtures("one_device")
def test_other_texts_and_functions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_microbatch is 'many', expected an integer of at least 1, 'auto'"):
        RoundPipeRunConfig(num_microbatch="many")  # type: ignore[arg-type]
    config = RoundPipeRunConfig(num_microbatch="auto", split_input=lambda args, kwargs, n: ([args] * n, [kwargs] * n))
    with pytest.raises(ValueError, match=r"num_microbatch is 'auto' and split_input is a function"):
        train(model_of(config), 8)
    with pytest.raises(ValueError, match=r"auto_microbatches is 0"):
        model_of().auto_microbatches = 0
