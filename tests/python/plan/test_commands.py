"""Cost files, predictions, pictures and the command that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from roundpipe import ModelExecutePlan, _core
from roundpipe.cli import app, main
from roundpipe.plan.compare import predict
from roundpipe.plan.costs import PRESETS, load, parse
from roundpipe.plan.schedules import Request, choose

PRESET_NAMES = ["qwen3-1.7b", "llama3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora"]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "schema": "roundpipe-costs",
        "version": 1,
        "layers": [{"count": 6, "forward_ms": 2, "backward_ms": 4, "weight_bytes": 100}],
        "head": {"forward_ms": 3, "backward_ms": 5},
    }
    return made | changes


def request_of(name: str, **options: Any) -> Request:
    costs = load(name)
    return Request(costs, costs.cluster(options.pop("devices", None)), **{"microbatches": 16, **options})


# --- what is promised ---

# Bubble in percent, by preset; the last one of others was printed with a digit less. The published simulator begins the
# head before its input has arrived: for 20B and 32B, it printed 13.98 and 6.67.
PUBLISHED = {
    "published": [19.07, 14.28, 15.02, 6.92, 3.29],
    "gpipe": [36.1, 42.1, 41.7, 34.9, 31.2],
    "1f1b": [35.2, 42.1, 41.7, 34.9, 31.2],
    "interleaved-1f1b": [27.8, 30.6, 30.9, 15.1, 6.0],
    "looped-bfs": [25.0, 29.2, 30.4, 13.7, 4.4],
}


@pytest.mark.parametrize("schedule", list(PUBLISHED))
def test_published_figures_are_met(schedule: str) -> None:
    for name, expected in zip(PRESET_NAMES, PUBLISHED[schedule], strict=True):
        prediction = predict(schedule, request_of(name, mode="sync"))
        assert prediction.bubble_percent == pytest.approx(expected, abs=0.1), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("microbatches", "mode", "max_traffic", "limits"),
    [
        pytest.param(16, "async", 0, [0.7, 0.1, 0.1, 0.1, 0.1], marks=pytest.mark.long),
        pytest.param(8, "async", 0, [0.8, 0.2, 0.8, 0.1, 0.1], marks=pytest.mark.long),
        (16, "sync", 1.25, [7, 4.3, 6, 1.5, 0.8]),
        pytest.param(16, "sync", 2, [3, 3.4, 4.5, 1.5, 0.8], marks=pytest.mark.long),
    ],
)
def test_almost_no_bubble(microbatches: int, mode: str, max_traffic: float, limits: list[float]) -> None:
    for name, limit in zip(PRESET_NAMES, limits, strict=True):
        options = {"microbatches": microbatches, "mode": mode, "max_traffic": max_traffic, "gradient_groups": 0}
        request = request_of(name, **options)
        prediction = predict("roundpipe", request)  # simulated anew, and checked against the rules
        assert prediction.choice is not None
        found = [prediction.choice, *prediction.runners_up]
        best = min(found, key=lambda choice: choice.step_ms)
        assert 100 * best.bubble <= limit, name
        # Plans within 0.1 percent count as equal, so one with less traffic or overlap may be chosen.
        assert prediction.choice.step_ms <= 1.001 * best.step_ms, name
        assert prediction.bubble_percent <= limit + (0.1 if best is not prediction.choice else 0), name
        if max_traffic:
            assert prediction.traffic_ratio <= max_traffic + 1e-9


# --- commands ---


def test_help_lists_options_in_their_order_and_drops_nothing() -> None:
    commands: Any = typer.main.get_command(app)
    for name in ("plan", "export", "demo"):
        for option in commands.commands[name].params:
            assert not re.search(r"\[\w", option.help or ""), option.help  # rich takes it for markup


def test_other_schedules_stand_beside_ours() -> None:
    options = ("--mode", "sync", "--microbatches", "16", "--search-seconds", "0.1", "--compare", "all", "--json")
    report = json.loads(run("plan", "llama3.1-8b", *options).stdout)
    assert (report["devices"], report["microbatches"], report["mode"]) == (8, 16, "sync")
    by_name = {entry["schedule"]: entry for entry in report["schedules"]}
    ours, with_groups, *others = by_name
    assert ours == "roundpipe" and re.fullmatch(r"roundpipe, \d+ gradient groups", with_groups)
    assert others == ["published", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"]
    for entry in by_name.values():
        assert entry["step_ms"] > 0 and 0 <= entry["bubble_percent"] < 50 and entry["traffic_ratio"] >= 0
    assert by_name["published"]["traffic_ratio"] == pytest.approx(2)
    plan = by_name["roundpipe"]["plan"]
    assert plan["forward"][0]["layers"][0] == 0 and plan["backward"][-1]["layers"][0] == 0
    for field in ("step_ms", "bubble_percent", "traffic_ratio"):
        assert plan[field] == pytest.approx(report[field])
    assert plan["summary"] == report["summary"]


@pytest.mark.long
def test_bytes_over_links(tmp_path: Path) -> None:
    machine = ("gpt-oss-20b", "--devices", "4", "--microbatches", "5", "--links", "--search-seconds", "0.07", "--json")
    page = tmp_path / "links.html"
    planned = json.loads(run("plan", *machine, "--compare", "all", "--picture", str(page)).stdout)
    blind = json.loads(run("plan", *[option for option in machine if option != "--links"]).stdout)
    assert planned["summary"] != blind["summary"] and planned["limit"] == "compute"
    entries = [entry for entry in planned["schedules"] if "gradient groups" not in entry["schedule"]]
    assert [entry["schedule"] for entry in entries] == ["roundpipe", "published"]
    assert entries[0]["step_ms"] == pytest.approx(planned["step_ms"], rel=1e-3)
    assert entries[0]["step_ms"] < entries[1]["step_ms"]
    assert "upload" in page.read_text()
    updates = json.loads(run("plan", *machine, "--update-rate", "2").stdout)
    assert updates["limit"] == "optimizer"
    # The optimizer updates all of 24 layers and the head once a step.
    assert updates["step_ms"] == pytest.approx((24 * 1.645e9 + 2 * 201_088 * 2880) / 2e6, rel=0.02)


def test_more_gradient_groups_are_shown_where_they_shorten_the_step() -> None:
    machine = ("qwen3-1.7b", "--mode", "sync", "--microbatches", "16", "--search-seconds", "0.03")
    report = json.loads(run("plan", *machine, "--compare", "1f1b", "--json").stdout)
    one, more, other = report["schedules"]
    assert report["inputs"]["gradient_groups"] == one["gradient_groups"] == 1 and other["schedule"] == "1f1b"
    assert all(stage["replicas"] == 1 for stage in one["plan"]["backward"])
    groups, found = more["gradient_groups"], report["more_groups"]
    assert more["schedule"] == f"roundpipe, {groups} gradient groups" and more["step_ms"] < 0.999 * one["step_ms"]
    assert 1 < max(stage["replicas"] for stage in more["plan"]["backward"]) <= groups <= 16
    assert found["gradient_groups"] == groups and found["step_ms"] < report["step_ms"]
    assert found["less_time_percent"] == pytest.approx(100 * (1 - found["step_ms"] / report["step_ms"]))
    line = f"with gradient_groups={groups}: {found['less_time_percent']:.1f} % less time"
    assert line in run("plan", *machine).stdout
    for none in ("0", str(groups)):
        assert "more_groups" not in json.loads(run("plan", *machine, "--gradient-groups", none, "--json").stdout)


def test_plan_explains_itself_and_its_stages_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    quick = ("plan", "qwen3-1.7b", "--search-seconds", "0.1", "--mode")
    report = json.loads(run(*quick, "sync", "--json", "--save", str(path)).stdout)
    assert report["limit"] in ("compute", "traffic limit", "device memory", "fill and drain")
    assert report["next_best"]["step_ms"] >= report["step_ms"]
    plan = ModelExecutePlan.load(path)
    plan.check_valid(29, "fused")
    text = run(*quick, "inference").stdout
    assert "limited by" in text and "next best" in text


def test_pictures(tmp_path: Path) -> None:
    png, page, trace = tmp_path / "t.png", tmp_path / "t.html", tmp_path / "t.json"
    for path in (png, page, trace):
        options = ("--picture", str(path), "--devices", "2", "--microbatches", "4", "--search-seconds", "0")
        run("plan", "gpt-oss-20b", "--compare", "1f1b", *options)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<svg") == 2 and "recompute" in text and "http" not in text.replace("http://www.w3.org", "")
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"] for event in events if event["ph"] == "X"}
    assert rows == {0, 1} and all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert not list(tmp_path.glob("*.part"))


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, "schema is 'other'"),
        ({"version": 2}, "version is 2"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [{"forward_ms": -1, "backward_ms": 1}]}, r"layers\[0\].forward_ms is -1"),
        ({"layers": [{"forward_ms": 1}]}, r"layers\[0\].backward_ms is missing"),
        ({"layers": [{"forward_ms": 1, "backward_ms": 1, "count": 0}]}, r"layers\[0\].count is 0"),
        ({"layers": [{"forward_ms": 1, "backward_ms": 1, "size": 0}]}, "unknown field 'size'"),
        ({"layers": 3}, "layers is a int"),
        ({"head": {"forward_ms": "1", "backward_ms": 1}}, "head.forward_ms is '1'"),
        ({"devices": [{"speed": 0}]}, r"devices\[0\].speed is 0"),
        ({"hop_latency_ms": float("nan")}, "hop_latency_ms is nan"),
        ({"baseline_stages": {"pipeline": [1.5]}}, "baseline_stages.pipeline"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_bad_cost_file_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"\[costs\].*" + message):
        parse(document(**changes), "costs.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "no file 'nowhere.json'"),
        ([], "there is no MODEL"),
        (["--measure", "m.toml", "--devices", "2"], "--devices has no effect here, expected it only with a MODEL"),
        (["qwen3-1.7b", "--devices", "0"], "--devices is 0"),
        (["qwen3-1.7b", "--microbatches", "0"], "--microbatches is 0"),
        (["qwen3-1.7b", "--mode", "fast"], "--mode is fast"),
        (["qwen3-1.7b", "--compare", "best"], "no schedule 'best'"),
        (["qwen3-1.7b", "--links", "--compare", "gpipe", "--search-seconds", "0"], "--links does not know 'gpipe'"),
        (["qwen3-1.7b", "--links", "--update-rate", "-1"], "--update-rate is -1"),
        (["qwen3-1.7b", "--search-seconds", "-1"], "--search-seconds is -1"),
        (["qwen3-1.7b", "--gradient-groups", "-1"], "--gradient-groups is -1"),
        (["qwen3-1.7b", "--max-traffic", "0.2"], "max_traffic is 0.2"),
        (["qwen3-1.7b", "--save", "/no/such/folder/plan.json"], "--save is /no/such/folder"),
        (["qwen3-1.7b", "--picture", "plan.gif"], "plan.gif ends in '.gif', expected .html, .png or .json"),
    ],
)
def test_bad_options_end_with_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roundpipe", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_malformed_json(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"costs.json is not JSON.*expected a cost file"):
        load(str(path))


def test_a_cost_file_may_be_toml(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'schema = "roundpipe-costs"\nversion = 1\nhead = {forward_ms = 3, backward_ms = 5}\n'
        "layers = [\n  {count = 6, forward_ms = 2, backward_ms = 4, weight_bytes = 100},\n]\n"
    )
    read, made = load(str(path)), parse(document(), "costs.json")
    assert [(c.forward_ms, c.backward_ms, c.weight_bytes, c.gradient_bytes) for c in read.layers] == [
        (c.forward_ms, c.backward_ms, c.weight_bytes, c.gradient_bytes) for c in made.layers
    ]
    path.write_text("layers = [")
    with pytest.raises(ValueError, match=r"\[costs\].*costs.toml is not TOML.*expected a cost file"):
        load(str(path))
    path.write_text('schema = "other"')
    with pytest.raises(ValueError, match="schema is 'other'"):
        load(str(path))


def test_presets_are_cost_files() -> None:
    assert list(PRESETS) == PRESET_NAMES
    for name in PRESET_NAMES:
        assert load(name).name == name
        assert parse(json.loads(json.dumps(PRESETS[name])), name).layers


def test_stages_are_saved_and_loaded(tmp_path: Path) -> None:
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(2), range(2, 3)], [range(3, 4), range(3)]
    plan.save(tmp_path / "plan.json")
    assert ModelExecutePlan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match="cannot read"):
        ModelExecutePlan.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"schema": "roundpipe-stages", "version": 1, "forward": [[0]], "backward": []}')
    with pytest.raises(ValueError, match=r"forward is \[\[0\]\]"):
        ModelExecutePlan.load(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="no schema"):
        ModelExecutePlan.load(tmp_path / "other.json")


def test_whole_plans_are_saved_and_loaded(tmp_path: Path) -> None:
    from roundpipe.plan.plans import load_plan, save_plan

    request = request_of("qwen3-1.7b", microbatches=8, effort=1_000_000)
    choice = choose(request)[0]
    plan = _core.Placer(choice.recipe, request.costs.layers, request.cluster, request.rules()).next()
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    document = json.loads(path.read_text())
    for change, message in [
        ({"jobs": [["forward", [0, 1]]]}, r"jobs\[0\] is"),
        ({"jobs": document["jobs"][:-1]}, "no job runs the backward"),
        ({"jobs": [["sideways", *document["jobs"][0][1:]]]}, "phase is 'sideways'"),
        ({"layers": "29"}, "expected whole numbers"),
        ({"version": 3}, "no schema"),
    ]:
        path.write_text(json.dumps(document | change))
        with pytest.raises(ValueError, match=message):
            load_plan(path)


def test_measured_and_estimated_costs_become_cost_files(tmp_path: Path) -> None:
    import torch
    from torch import nn

    import roundpipe
    from roundpipe.plan.costs import estimate, save

    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    model[0].weight.requires_grad_(False)
    costs = estimate(model, tokens=1000, width=16, device_tflops=0.001)
    assert costs[0].forward_ms == pytest.approx(2 * 128 * 1000 / 1e9 * 1e3)
    assert (costs[0].weight_bytes, costs[0].gradient_bytes, costs[1].gradient_bytes) == (512, 0, 512)
    with pytest.raises(ValueError, match="tokens is 0"):
        estimate(model, 0, 1, 1.0)
    pipe = roundpipe.RoundPipe(model)
    for _ in range(3):
        pipe.forward_backward((torch.ones(4, 8),), loss_fn=lambda outputs, _: outputs.sum())
    for measured in (costs, pipe.costs()):
        save(measured, tmp_path / "costs.json", "mine")
        again = load(str(tmp_path / "costs.json"))
        assert [cost.forward_ms for cost in again.layers] == [cost.forward_ms for cost in measured]
        assert again.name == "mine"


def test_a_plan_of_other_sizes_is_refused() -> None:
    import torch
    from torch import nn

    import roundpipe

    roundpipe.devices("virtual:2")
    pipe = roundpipe.RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    sizes = _core.BaselineSizes()
    sizes.pipeline = [1, 1]
    plan = _core.baseline_plan(_core.Baseline.ONE_FORWARD_ONE_BACK, sizes, 3, 2, 4)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    with pytest.raises(ValueError, match="the plan has 4 microbatches, expected 2"):
        pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda outputs, _: outputs.sum(), run_config=config)
