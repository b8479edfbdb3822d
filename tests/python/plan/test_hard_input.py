"""Input at the edge, or past it: `roundpipe plan` answers or refuses it by name, and never shows a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app, main
from roundpipe.plan.compare import ImpossibleScheduleError, predict
from roundpipe.plan.costs import load
from roundpipe.plan.schedules import Request
from sweeps import sweep

QUICK = ("--search-seconds", "0.00001", "--devices", "2", "--microbatches", "4")


def write_costs(path: Path, **changes: Any) -> str:
    layers = [{"count": 4, "forward_ms": 2, "backward_ms": 4, "weight_bytes": 100}]
    document = {"schema": "roundpipe-costs", "version": 1, "name": "mine", "layers": layers} | changes
    path.write_text(json.dumps(document))
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    """The message with which the command line ends; checks that it is one of ours."""
    with pytest.raises(ValueError, match=r"^\[\w+\] .*") as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def one(forward_ms: float, backward_ms: float) -> list[dict[str, float]]:
    return [{"forward_ms": forward_ms, "backward_ms": backward_ms}]


# --- costs at the edge ---


@pytest.mark.parametrize("layers", [one(0, 0), one(1, 2), one(0, 0) * 4, one(1e-308, 1e-308) * 3, one(1e11, 1e11) * 4])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_costs_at_the_edge_give_numbers(layers: list[dict[str, float]], mode: str, tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json", layers=layers)
    report = json.loads(run("plan", path, "--mode", mode, "--compare", "published", "--json", *QUICK))
    for entry in [report, *report["schedules"]]:
        assert entry["step_ms"] >= 0 and 0 <= entry["bubble_percent"] <= 100
    for shown in (run("plan", path, "--mode", mode, *QUICK), run("plan", path, "--mode", "inference", *QUICK)):
        assert "inf" not in shown.replace("inference", "") and "nan" not in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": one(1e308, 1)}, "layers[0].forward_ms is 1e+308"),
        ({"layers": one(1, 10**400)}, "layers[0].backward_ms is 1000"),
        ({"layers": one(9e11, 1) * 2}, "1.8e+12 forward_ms together"),
        ({"layers": [{**one(1, 1)[0], "weight_bytes": 9e18}]}, "layers[0].weight_bytes is 9e+18"),
        ({"layers": [{**one(1, 1)[0], "saved_bytes": 9e13}] * 2}, "1.8e+14 saved_bytes together"),
        ({"layers": [{**one(1, 1)[0], "count": 10**30}]}, "layers[0].count is 1000"),
        ({"layers": [{**one(1, 1)[0], "count": 2000}] * 2}, "4000 layers, expected at most 2000"),
        ({"hop_latency_ms": 1e308}, "hop_latency_ms is 1e+308"),
        ({"devices": [{"speed": 5e-324}]}, "devices[0].speed is 5e-324"),
        ({"devices": [{"memory_bytes": 1e30}]}, "devices[0].memory_bytes is 1e+30"),
        ({"devices": [{"count": 1000}] * 2}, "devices are 2000"),
        ({"link_up_gb_per_s": 1e-300}, "link_up_gb_per_s is 1e-300"),
        ({"baseline_stages": {"pipeline": [10**30]}}, "baseline_stages.pipeline is [1000"),
        ({"version": True}, "version is True"),
        ({"name": ["a"]}, "name is ['a']"),
        ({"name": "\ud800"}, "name is '\\ud800'"),
        ({"x" * 10_000: 1}, "unknown field 'xxx"),
    ],
)
def test_numbers_out_of_range_are_refused_by_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json", **changes)
    assert message in refused("plan", path)


# --- files that hold no costs ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\0" * 100, "is not JSON"),
        (bytes(range(256)), "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"layers":' * 100_000, "nested too deeply"),
        (b"9" * 6000, "is not JSON"),
        (b"schema = 'roundpipe-costs'\nversion = 1\n", "is not JSON"),
        (b"[]", "expected an object"),
        (b"null", "expected an object"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(content)
    assert message in refused("plan", str(tmp_path / "costs.json"))


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = Path(write_costs(tmp_path / "costs.json"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "mine" in run("plan", str(path), *QUICK)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    assert "no file" in refused("plan", "a" * 5000)
    assert "no config.json" in refused("plan", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "nothing"}', "transformers makes no model"),
        ('{"model_type": "qwen3", "hidden_size": "x"}', "transformers makes no model"),
        ('{"model_type": "qwen3", "num_hidden_layers": 0, "hidden_size": 64}', "no nn.ModuleList"),
        ('{"model_type": "qwen3", "num_hidden_layers": 1000000}', "num_hidden_layers in"),
        ('{"model_type": "qwen3", "hidden_size": 1000000000000}', "hidden_size in"),
    ],
)
def test_configurations_that_make_no_model(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert message in refused("plan", str(tmp_path))


# --- numbers in options ---


HUGE = ["inf", "nan", "1e308", "-1", str(10**30)]
OPTIONS = [
    *("devices", "microbatches", "search-seconds", "keep", "memory", "update-rate", "tokens", "tflops"),
    "host-memory",
]


@sweep("option, huge", OPTIONS, HUGE, ids=str, together=1)
def test_huge_options_are_refused_by_name(
    option: str, huge: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roundpipe", "plan", "qwen3-1.7b", f"--{option}", huge])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    # typer may colour its own messages, whatever the terminal is.
    error = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err)
    assert (option in error or "[bytes]" in error) and "Traceback" not in error


@pytest.mark.parametrize("traffic", ["inf", "nan", "-1"])
def test_a_traffic_limit_is_a_number(traffic: str) -> None:
    assert "--max-traffic is" in refused("plan", "qwen3-1.7b", "--max-traffic", traffic)


def test_a_step_too_large_to_simulate_is_refused(tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json")
    costs = load(path)
    with pytest.raises(ImpossibleScheduleError, match="jobs x microbatches, expected at most"):
        predict("gpipe", Request(costs, costs.cluster(8), 4096))
    layers = [{"count": 1000, "forward_ms": 1, "backward_ms": 1, "weight_bytes": 1e11}]
    costs = load(write_costs(tmp_path / "costs.json", layers=layers, link_up_gb_per_s=25))
    with pytest.raises(ImpossibleScheduleError, match="leave out --links"):
        predict("published", Request(costs, costs.cluster(8), 8, links=costs.cluster(8, with_links=True)))


def test_a_byte_of_memory_ends(tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json")
    assert "does not fit" in run("plan", path, "--memory", "1B", *QUICK)
    assert "does not fit" in run("plan", path, "--memory", "8000000TB", "--host-memory", "1B", *QUICK)


# --- output files ---


@pytest.mark.parametrize("option", ["measure", "picture", "save"])
def test_files_that_cannot_be_written_are_refused_before_any_work(option: str, tmp_path: Path) -> None:
    def message(path: str) -> str:
        return refused("plan", "no such costs", f"--{option}", path)

    (tmp_path / "file").write_text("")
    assert "a folder that exists" in message(str(tmp_path / "none" / "x"))
    assert "a folder that exists" in message(str(tmp_path / "file" / "x"))
    assert "not a folder" in message(str(tmp_path))
    assert "the path of a file" in message("")
    other = "--save" if option != "save" else "--picture"
    assert "another file than" in refused("plan", "none", f"--{option}", "x", other, "x")


@pytest.mark.parametrize("ending", [".png", ".html", ".json"])
def test_a_file_that_turns_out_not_to_be_writable_is_refused(ending: str, tmp_path: Path) -> None:
    # As long as names may be; the temporary file beside it has a longer one.
    path = str(tmp_path / ("x" * (255 - len(ending)) + ending))
    message = refused("plan", write_costs(tmp_path / "c.json"), "--picture", path, *QUICK)
    assert message.startswith("[files] cannot write")
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # for root, every folder has permission
    assert "can be written" in refused("plan", "qwen3-1.7b", "--picture", str(tmp_path / "x.png"))


def test_a_name_in_brackets_is_not_markup(tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json", name="[bold]mine[/none]")
    assert "[bold]mine[/none]" in run("plan", path, *QUICK)


def test_a_schedule_is_named_once() -> None:
    assert "gpipe only once" in refused("plan", "qwen3-1.7b", "--compare", "gpipe, gpipe")
    assert "no schedule ''" in refused("plan", "qwen3-1.7b", "--compare", ",")


# --- schedules that do not exist for the sizes ---


@pytest.mark.parametrize("links", [False, True])
def test_an_impossible_baseline_is_a_line_of_the_table(links: bool, tmp_path: Path) -> None:
    path = write_costs(tmp_path / "costs.json", layers=one(1, 2), link_up_gb_per_s=25)
    more = ("--links",) if links else ()
    output = run("plan", path, "--mode", "sync", "--compare", "all", *more, *QUICK)
    lines = {line.split()[1]: line for line in output.splitlines() if len(line.split()) > 4}
    for name in () if links else ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):
        assert f"{name} puts the layers below the head on the devices, expected at least two layers" in lines[name]
    assert ("impossible because" in output) == (not links)
    entries = json.loads(run("plan", path, "--mode", "sync", "--compare", "all", "--json", *more, *QUICK))["schedules"]
    assert [entry["schedule"] for entry in entries if "step_ms" in entry] == [
        *("roundpipe", "roundpipe, 2 gradient groups", "published")
    ]
    assert all("expected" in entry["impossible"] for entry in entries if "step_ms" not in entry)


def test_stages_of_another_model_are_a_line_of_the_table(tmp_path: Path) -> None:
    stages = {"pipeline": [9, 9], "chunks": [1, 1, 1], "forward": [3], "backward": [3]}
    path = write_costs(tmp_path / "costs.json", baseline_stages=stages)
    picture = tmp_path / "x.html"
    output = run(
        "plan",
        path,
        "--compare",
        "1f1b,published,looped-bfs",
        "--picture",
        str(picture),
        "--gradient-groups",
        "0",
        *QUICK,
    )
    assert "pipeline has 18 layers, expected the 3 below the head" in output
    assert "chunks has 3 stages, expected a multiple of the 2 devices" in output
    assert picture.read_text().count("<svg") == 2


# --- options without effect ---


@pytest.mark.parametrize(
    ("arguments", "option", "needs"),
    [
        (["--update-rate", "2"], "--update-rate", "--links"),
        (["--mode", "inference", "--host-memory", "1GB"], "--host-memory", "--mode async or sync"),
        (["--mode", "inference", "--compare", "all"], "--compare", "--mode async or sync"),
        (["--mode", "inference", "--keep", "2"], "--keep", "--mode async or sync"),
        (["--tokens", "5"], "--tokens", "a model's folder"),
        (["--train", "lora"], "--train", "a model's folder"),
        (["--tflops", "5"], "--tflops", "a model's folder"),
    ],
)
def test_options_without_effect_are_refused_by_name(arguments: list[str], option: str, needs: str) -> None:
    message = refused("plan", "qwen3-1.7b", *arguments)
    assert message.startswith(f"[options] {option} has no effect here") and needs in message
