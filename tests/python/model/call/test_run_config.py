from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from roundpipe.model.call.execute_plan import ModelExecutePlan
from roundpipe.model.call.run_config import RoundPipeRunConfig, layered, resolve


def test_defaults() -> None:
    config = resolve(None, None, devices=4)
    assert config.requires_grad is True
    assert config.output_device == torch.device("cpu")
    assert config.preserve_rng_state is True
    assert config.recompute_grain == "stage"
    assert (config.num_microbatch, config.num_microbatch_is_default) == (5, True)
    assert (config.split_input, config.split_label, config.merge_output, config.execute_plan) == (
        None,
        None,
        True,
        None,
    )


def test_grad_mode_is_read_at_the_call() -> None:
    with torch.no_grad():
        assert resolve(RoundPipeRunConfig(), None, devices=1).requires_grad is False
        assert resolve(RoundPipeRunConfig(requires_grad=True), None, devices=1).requires_grad is True


def test_call_wins_over_model_wins_over_default() -> None:
    plan = ModelExecutePlan()
    model = RoundPipeRunConfig(
        num_microbatch=3, merge_output=True, preserve_rng_state=False, output_device="meta", execute_plan=plan
    )
    call = RoundPipeRunConfig(num_microbatch=2, merge_output=False, recompute_grain="layer", requires_grad=False)
    config = resolve(call, model, devices=8)
    assert (config.num_microbatch, config.num_microbatch_is_default) == (2, False)
    assert config.merge_output is False  # a False is a value, not an absence
    assert config.preserve_rng_state is False
    assert config.requires_grad is False
    assert config.recompute_grain == "layer"
    assert config.output_device == torch.device("meta")
    assert config.execute_plan == plan and config.execute_plan is not plan
    assert resolve(None, model, devices=8).num_microbatch == 3


def test_every_field_can_be_inherited() -> None:
    names = [field.name for field in dataclasses.fields(RoundPipeRunConfig)]
    values = dict(
        zip(
            names,
            (False, "cpu", False, "layer", 7, (None, None), len, False, ModelExecutePlan(), "microbatch", 3, True, 9),
            strict=True,
        )
    )
    model = RoundPipeRunConfig(**values)
    config = resolve(RoundPipeRunConfig(), model, devices=1)
    for name in names:
        expected = torch.device("cpu") if name == "output_device" else values[name]
        assert getattr(config, name) == expected, name


def test_auto_stands_for_the_chosen_number_and_until_then_for_the_default() -> None:
    auto = RoundPipeRunConfig(num_microbatch="auto")
    for chosen, number in ((None, 5), (7, 7)):
        config = resolve(None, auto, devices=4, chosen=chosen)
        assert (config.num_microbatch, config.num_microbatch_is_default) == (number, True)
        assert config.num_microbatch_is_open == (chosen is None)
    asked = resolve(RoundPipeRunConfig(num_microbatch=2), auto, devices=4, chosen=7)
    assert (asked.num_microbatch, asked.num_microbatch_is_default, asked.num_microbatch_is_open) == (2, False, False)


def test_layered_takes_the_first_that_is_set() -> None:
    merged = layered(
        None, RoundPipeRunConfig(merge_output=False), RoundPipeRunConfig(merge_output=True, num_microbatch=2)
    )
    assert merged == RoundPipeRunConfig(merge_output=False, num_microbatch=2)


def test_resolved_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve(None, None, devices=1).num_microbatch = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requires_grad", "yes"),
        ("preserve_rng_state", 2),
        ("output_device", "nowhere"),
        ("output_device", 1.5),
        ("recompute_grain", "model"),
        ("num_microbatch", 0),
        ("num_microbatch", -1),
        ("num_microbatch", 2.0),
        ("num_microbatch", True),
        ("split_input", (None,)),
        ("split_input", 3),
        ("execute_plan", [range(3)]),
    ],
)
def test_invalid_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^\[RoundPipeRunConfig\] {field} is "):
        RoundPipeRunConfig(**{field: value})
    config = RoundPipeRunConfig()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=rf"^\[run config of the call\] {field} is "):
        resolve(config, None, devices=1)
    with pytest.raises(ValueError, match=rf"^\[run config of the model\] {field} is "):
        resolve(None, config, devices=1)


def test_not_a_config() -> None:
    with pytest.raises(ValueError, match="got a dict, expected a RoundPipeRunConfig"):
        resolve({"num_microbatch": 3}, None, devices=1)  # type: ignore[arg-type]
