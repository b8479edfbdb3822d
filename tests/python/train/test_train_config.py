"""The configuration of a run: where values come from, and which are refused."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest
from typer.testing import CliRunner

from roundpipe import _core
from roundpipe.cli import app
from roundpipe.train.command import TrainOptions
from roundpipe.train.config import TrainConfig
from roundpipe.train.config_file import read_config, written_config
from roundpipe.train.interface.option_names import _INSTEAD, ALIASES, FIRST, NEEDED

ROOT = Path(__file__).resolve().parents[3]


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", *arguments, "--print-config"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_written_file_gives_the_same_configuration(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": 'a "quoted" folder\\',
        "data": ["ä.jsonl", "b"],
        "out": "run",
        "lora": True,
        "lora_targets": ["q_proj"],
        "learning_rate": 3e-05,
        "steps": 7,
        "held_out": 0.125,
        "devices": "virtual:2",
    }
    for config in (TrainConfig(), TrainConfig(**values)):
        (tmp_path / "run.toml").write_text(written_config(config))
        assert TrainConfig(**read_config(tmp_path / "run.toml")) == config


def test_options_come_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('lora = true\nlora_rank = 4\nclip = 2\nrows = "padded"\n')
    (tmp_path / "printed.toml").write_text(
        printed(
            "--config", str(tmp_path / "run.toml"), "--lora-rank", "3", "--rows", "packed", "--data", "a", "--data", "b"
        )
    )
    found = TrainConfig(**read_config(tmp_path / "printed.toml"))
    assert found == TrainConfig(lora=True, lora_rank=3, clip=2.0, rows="packed", data=["a", "b"])
    assert isinstance(found.clip, float)


def test_a_run_that_goes_on_keeps_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'model = "m"\nlength = 64\nseed = 5\nout = "{tmp_path}"\n')
    options = TrainOptions(out=str(tmp_path), resume=True, seed=0)
    assert options.merged(frozenset({"out", "resume"})).seed == 5
    assert options.merged(frozenset({"out", "resume", "seed"})).seed == 0
    assert TrainOptions(out=str(tmp_path)).merged(frozenset({"out"})).length == TrainConfig().length


def test_every_value_is_an_option_and_in_the_printed_file() -> None:
    text = printed()
    for field in dataclasses.fields(TrainConfig):
        assert f"\n{field.name} = " in text or f"\n# {field.name} =\n" in text
    # Where PY_COLORS or FORCE_COLOR is set, the help is in colours, which may begin within a name.
    help_text = click.unstyle(CliRunner().invoke(app, ["train", "--help-all"], env={"COLUMNS": "200"}).output)
    for field in dataclasses.fields(TrainConfig):
        assert "--" + field.name.replace("_", "-") in help_text


def test_the_help_begins_with_what_matters() -> None:
    text = click.unstyle(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120"}).output)
    options = {field.name for field in dataclasses.fields(TrainOptions)}
    shown = {name for name in options if f" --{name.replace('_', '-')} " in text}
    assert shown == {*NEEDED, *FIRST, "config", "help_all"}
    assert len(NEEDED) == 3 and len(FIRST) == 11
    assert f"{len(options) - len(shown)} more options" in text


def test_names_that_people_know_are_accepted(tmp_path: Path) -> None:
    text = printed("--lr", "1e-3", "--max-seq-length", "64", "--output-dir", "here", "--train-file", "a")
    (tmp_path / "printed.toml").write_text(text)
    (tmp_path / "known.toml").write_text('lr = 1e-3\nmax_length = 64\noutput_dir = "here"\ntrain_file = ["a"]\n')
    expected = TrainConfig(learning_rate=1e-3, length=64, out="here", data=["a"])
    for file in ("printed.toml", "known.toml"):
        assert TrainConfig(**read_config(tmp_path / file)) == expected


def test_other_names_are_of_one_option() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    others = [name for names in ALIASES.values() for name in names]
    assert len({*others, *_INSTEAD, *fields}) == len(others) + len(_INSTEAD) + len(fields)
    assert {*ALIASES, *(option for option, _ in _INSTEAD.values())} <= fields


def test_an_option_is_given_once_by_any_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--lr", "1", "--learning-rate", "1", "--print-config"])
    assert result.exit_code == 2 and "--learning-rate is given twice" in click.unstyle(result.output)
    (tmp_path / "run.toml").write_text("lr = 1.0\nlearning_rate = 1.0\n")
    with pytest.raises(ValueError, match="gives learning_rate twice"):
        read_config(tmp_path / "run.toml")


def test_an_option_of_other_trainers_is_led_on(tmp_path: Path) -> None:
    for option in ("--batch-size", "--per-device-train-batch-size=8"):
        refused = CliRunner().invoke(app, ["train", option]).exception
        assert re.match(r"\[train\] --\S*batch-size is no option here, expected --batch-tokens: ", str(refused))
    (tmp_path / "run.toml").write_text("gradient_accumulation_steps = 4\n")
    with pytest.raises(ValueError, match=r"^\[train\] .* 'gradient_accumulation_steps', expected batch_tokens: "):
        read_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("learning_rte = 1e-3", "did you mean learning_rate?"),
        ("learning-rate = 1e-3", "did you mean learning_rate?"),
        ("zzz = 1", "--print-config lists all keys"),
        ('learning_rate = "fast"', 'learning_rate in {file} is "fast", expected a number'),
        ("length = 8.5", "length in {file} is 8.5, expected a whole number"),
        ("length = true", "length in {file} is true, expected a whole number"),
        ("lora = 1", "lora in {file} is 1, expected true or false"),
        ('data = "a.jsonl"', 'data in {file} is "a.jsonl", expected a list of texts'),
        ('optimizer = "adamm"', "expected adam, adamw, sgd, lion, adafactor, rmsprop, muon"),
        ("length =", "{file} is not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"^\[train\] ") as refused:
        read_config(file)
    assert said.format(file=file) in str(refused.value)


def test_the_table_of_options_is_the_engines() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "training_options.py"))
    assert made["text"]() == made["FILE"].read_text(), "run tools/training_options.py"
    hints = get_type_hints(TrainConfig)
    for option in _core.training_options():
        choices = [value for kind in (hints[option.name], *get_args(hints[option.name])) for value in get_args(kind)]
        given = [value for value in choices if isinstance(value, str)]
        wanted = [choice for choice in option.choices if (option.name, choice) != ("rows", "stream")]
        assert given == wanted or option.name == "device_memory", option.name  # a size, or the choice


# The rules of the table itself are tested in C++.
OUT_OF_RANGE: dict[str, Any] = {
    "learning_rate": 0.0,
    "steps": 10**20,
    "seed": -1,
    "batch_tokens": 1000,
    "rows": "stream",
    "samples": -1,
    "sample_tokens": 0,
    "held_out": 1.5,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[train\] --{name.replace('_', '-')} is "):
        TrainConfig(**{name: OUT_OF_RANGE[name]})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": True, "dora": True}, "--lora, --dora and --adapter are for different runs"),
        ({"lora_targets": ["q_proj"]}, "--lora-targets is q_proj, expected it only with --lora or --dora"),
        ({"model": "m", "adapter": "a"}, "--model and --adapter are given"),
        ({"momentum": 0.9}, "not for adamw"),
        ({"format": "preference"}, "--format is preference, expected it only with --task dpo or reward"),
        ({"evaluate_every": 2, "held_out": 0.0}, "expected it only with --held-out above 0"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^\[train\] ") as refused:
        TrainConfig(**values)
    assert said in str(refused.value)


@pytest.mark.parametrize("missing", ["model", "data", "out"])
def test_what_a_run_needs_is_asked_for(missing: str) -> None:
    values: dict[str, Any] = {"model": "m", "data": ["d"], "out": "o"}
    with pytest.raises(ValueError, match=f"--{missing} is not given"):
        TrainConfig(**{**values, missing: None if missing == "data" else ""}).require_run()
    TrainConfig(data=["d"], out="o", adapter="a").require_run()


def test_defaults_depend_on_what_is_trained() -> None:
    assert TrainConfig().rule_options["lr"] < TrainConfig(lora=True).rule_options["lr"]
    assert TrainConfig(length=8).tokens_of_step == 64
    assert TrainConfig(length=8, batch_tokens=9).tokens_of_step == 9
