"""Options of the commands: each is given once, and numbers are numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app
from roundpipe.train.config import TrainConfig


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "--steps", "3", "--steps", "5"], "--steps"),
        (["train", "--lora", "--lora-rank", "4", "--lora"], "--lora"),
        (["plan", "--microbatches", "4", "x.toml", "--microbatches=8"], "--microbatches"),
        (["checkpoint", "convert", "a", "b", "--to", "hf", "--to", "dcp"], "--to"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"{option} is given twice" in result.output


def test_options_that_take_several_values_may_be_given_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["train", "--print-config", "--model", "m", "--data", "a.txt", "--data", "b.txt", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert "a.txt" in result.output and "b.txt" in result.output


@pytest.mark.parametrize("name", ["clip", "learning_rate", "lora_alpha", "floor", "held_out", "weight_decay", "beta1"])
def test_numbers_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace("_", "-")):
        TrainConfig(**{name: float("nan")})
