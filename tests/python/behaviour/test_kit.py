"""bench/gpu/kit.py in its small form, and what it does when something is wrong. Nothing is asserted about times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]

import kit  # noqa: E402
from support.budget import Budget, Deadline  # noqa: E402
from support.checks import Check  # noqa: E402
from support.comparison import ContestantError, Size, compare, longest_row  # noqa: E402
from support.contestants import Contestant, contestants  # noqa: E402
from support.equality import difference  # noqa: E402
from support.report import Report  # noqa: E402
from support.training_request import Request  # noqa: E402

REQUEST = Request(
    way="chain", peer=False, shape="tiny", device="virtual:1", tokens=32, rows=2, microbatches=1, grain="stage"
)


def rows(report: str, title: str) -> list[list[str]]:
    """The cells of the table under `## title`, without its header."""
    part = report.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.long
def test_the_small_form(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "kit.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = out.read_text()
    assert report == done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]

    checks = rows(report, "Checks")
    assert {result for _, result, _ in checks} == {"passed"}
    assert re.fullmatch(r"[1-9]\d* passed, \d+ skipped", checks[-1][2])
    assert len(rows(report, "Link")) == 3
    speed = {(name, mode): cells for name, mode, *cells in rows(report, "Tokens a second")}
    _, _, ours, theirs, ratio, distance = speed["FSDP2, CPU offload", "sync"]
    assert float(ours.replace(",", "")) > 0 and float(theirs.replace(",", "")) > 0 and float(ratio) > 0
    assert float(distance) <= kit.BOUNDS[torch.float32]
    assert ("nobody", "async") in speed, "the published package has asynchronous steps, and needs CUDA"
    assert rows(report, "Longest row")[0][:3] == ["ours", "32", "4,096 do not fit"]
    # Who has no row has a reason.
    for title in ("Tokens a second", "Longest row"):
        part = report.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for name in ("roundpipe 0.1.1", "FSDP2, CPU offload", "DeepSpeed ZeRO-3 offload"):
            assert any(name in cells[0] for cells in rows(report, title)) or f"- no figures of {name}: " in part


def test_failed_checks_are_said_before_any_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "gpu" / "kit.py"), "--quick", "--out", str(out)])
    monkeypatch.setattr(kit, "equality", lambda *_: [Check("equality", "differs by 1e-3")])
    monkeypatch.setattr(kit, "card_tests", lambda *_: Check("tests", "", "3 passed"))
    monkeypatch.setattr(kit, "report_link", lambda *_: None)
    monkeypatch.setattr(kit, "report_throughput", lambda *_: True)
    monkeypatch.setattr(kit, "report_longest", lambda *_: None)
    with pytest.raises(SystemExit, match="a check failed"):
        kit.main()
    assert rows(out.read_text(), "Checks") == [
        ["equality", "FAILED: differs by 1e-3", ""],
        ["tests", "passed", "3 passed"],
    ]
    assert "no figure below is valid" in out.read_text()


def another_release(folder: Path, code: str) -> Contestant:
    (folder / "roundpipe").mkdir()
    (folder / "roundpipe" / "__init__.py").write_text(code)
    return Contestant("the other one", replace(REQUEST, peer=True), folder)


def test_who_hangs_is_stopped_and_named(tmp_path: Path) -> None:
    other = another_release(tmp_path, "import signal; signal.pause()")
    at_once = Budget(0, {"all": 1})["all"]
    with pytest.raises(ContestantError, match="stopped: no answer within 0 s") as raised:
        compare([other], [Size(2, 32, 1)], [], 1, at_once)
    assert raised.value.contestant is other
    with pytest.raises(ContestantError, match="stopped: no answer within 0 s"):
        longest_row(other, [32], at_once)


def test_who_fails_is_named_and_is_not_taken_for_ours(tmp_path: Path) -> None:
    other = another_release(tmp_path, "raise ImportError('the other one is broken')")
    with pytest.raises(ContestantError, match=r"^ImportError: the other one is broken$"):
        compare([other], [Size(2, 32, 1)], [], 1, Budget(300, {"all": 1})["all"])


def test_losses_that_differ_are_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, _ = contestants(REQUEST, None, None)
    other = Contestant("the other one", REQUEST)

    def differing(sides: list[Contestant], sizes: list[Size], *_: object) -> kit.Comparison:
        rates = {(side.name, mode): [1.0] for side in sides for mode in side.modes}
        return kit.Comparison(sizes[0], rounds=1, rates=rates, distance=0.5 if len(sides) > 1 else 0.0)

    monkeypatch.setattr(kit, "compare", differing)
    out = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "gpu" / "kit.py")])
    report = Report("test", out)
    deadline = Budget(60, {"all": 1})["all"]
    assert not kit.report_throughput(report, ours, [other], True, 1e-4, deadline)
    report.close()
    assert {row[0] for row in rows(out.read_text(), "Tokens a second")} == {"nobody"}
    assert "- no figures of the other one: a loss differs from ours by 5.0e-01 of its value" in out.read_text()


def test_a_batch_that_does_not_fit_is_made_smaller_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, _ = contestants(REQUEST, None, None)
    other = Contestant("the other one", REQUEST)

    def full(sides: list[Contestant], sizes: list[Size], *_: object) -> kit.Comparison:
        if sizes[-1].rows > 2:
            raise ContestantError(sides[-1], f"out of memory at {sizes[-1]}", sizes[-1])
        rates = {(side.name, mode): [1.0] for side in sides for mode in ours.modes}
        return kit.Comparison(sizes[-1], rounds=1, rates=rates)

    monkeypatch.setattr(kit, "compare", full)
    monkeypatch.setattr(kit, "SIZES", [Size(2, 32, 1), Size(4, 32, 1)])
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "gpu" / "kit.py")])
    out = tmp_path / "report.md"
    report = Report("test", out)
    assert kit.report_throughput(report, ours, [other], False, 1e-4, Budget(60, {"all": 1})["all"])
    report.close()
    found = rows(out.read_text(), "Tokens a second")
    assert [row[:3] for row in found] == [
        ["the other one", mode, "2 x 32 tokens in 1 microbatch"] for mode in ("async", "sync")
    ]
    assert "- the other one: smaller batches, since the other one: out of memory at 4 x 32 tokens" in out.read_text()


@pytest.mark.parametrize("wrong", [1.25, float("nan")])
def test_the_check_of_equality_sees_what_differs(wrong: float) -> None:
    right = [torch.ones(3)]
    assert difference(right, [torch.ones(3)]) == ""
    assert difference([torch.full((3,), 1.25)], right, 0.5) == ""
    assert difference([torch.tensor([1.0, 1.0, wrong])], right, 1e-3).startswith("differs by ")


def test_a_part_gets_what_those_before_it_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    budget = Budget(60, {"first": 1, "second": 2})
    assert budget["first"].left_s == 20
    now = 110.0
    assert budget["second"].left_s == 50
    assert budget["second"].share(5).left_s == 10
    now = 161.0
    assert budget["second"].left_s == 0
    assert Deadline(now).left_s == 0
