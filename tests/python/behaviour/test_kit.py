"""bench/gpu/kit.py in its small form, and what it does when something is wrong. Nothing is asserted about times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]

import kit  # noqa: E402
from support.budget import Budget, Deadline  # noqa: E402
from support.checks import Check  # noqa: E402
from support.comparison import ContestantError, Setting, Side, Size, best_setting, compare, longest_row  # noqa: E402
from support.contestants import Contestant  # noqa: E402
from support.equality import difference  # noqa: E402
from support.flops import step_flops  # noqa: E402
from support.language_models import configuration  # noqa: E402
from support.report import Report  # noqa: E402
from support.step_profile import events_of, summary  # noqa: E402
from support.trainers import make_trainer  # noqa: E402
from support.training_request import Lap, LapResult, Ready, Request  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from roundpipe import ModelExecutePlan  # noqa: E402

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
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "kit.py"), "--quick", "--minutes", "30", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = out.read_text()
    assert report == done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]

    checks = rows(report, "Checks")
    assert {result for _, result, _ in checks} == {"passed"}
    assert re.fullmatch(r"[1-9]\d* passed, \d+ skipped", checks[-1][2])
    assert len(rows(report, "Link")) == 3
    speed = rows(report, "Tokens a second")
    assert [cells[:3] for cells in speed if cells[0] == "ours"] == [
        ["ours", mode, size] for size in ("4 x 32", "8 x 32") for mode in ("sync", "async")
    ]
    for name in ("FSDP2, CPU offload", "plain loop"):
        (small, large) = (cells for cells in speed if cells[0] == name)
        for _, mode, _, setting, theirs, _, _, mine, ratio, by_round, apart in (small, large):
            assert mode == "sync" and "microbatch" in setting and all(float(r) > 0 for r in by_round.split(", "))
            assert float(mine.replace(",", "")) > 0 and float(theirs.replace(",", "")) > 0 and float(ratio) > 0
            assert float(apart) <= kit.BOUNDS[torch.float32]
    assert {cells[0] for cells in rows(report, "Tokens a second of tiny")} == {"ours", "FSDP2, CPU offload"}
    assert {cells[0] for cells in rows(report, "Steps in both forms")} == {"ours, exact", "ours, fast"}
    assert rows(report, "Longest row")[0][:3] == ["ours", "32", "4,096"]
    assert len(rows(report, "Large models on one card")) == 3
    assert [cells[:3] for cells in rows(report, "Several cards")] == [
        [cards, "ours", mode] for cards in ("1", "2") for mode in ("sync", "async")
    ]
    # Who has no row has a reason, and who has one has told its settings.
    for title in ("Tokens a second", "Longest row"):
        part = report.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for name in ("ours", "roundpipe 0.1.1", "FSDP2, CPU offload", "plain loop", "DeepSpeed ZeRO-3 offload"):
            assert f"\n- {name}: " in part


def test_failed_checks_are_said_before_any_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    program = str(ROOT / "bench" / "gpu" / "kit.py")
    monkeypatch.setattr(sys, "argv", [program, "--quick", "--parts", "checks", "--out", str(out)])
    monkeypatch.setattr(kit, "equality", lambda *_: [Check("equality", "differs by 1e-3")])
    monkeypatch.setattr(kit, "card_tests", lambda *_: Check("tests", "", "3 passed"))
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


def test_who_hangs_is_stopped(tmp_path: Path) -> None:
    other = another_release(tmp_path, "import signal; signal.pause()")
    at_once = Budget(0, {"all": 1})["all"]
    with pytest.raises(ContestantError, match="stopped: no answer within 0 s"), Side(other) as side:
        side.set_up(at_once)


@pytest.mark.long
def test_who_fails_is_named_and_is_not_taken_for_ours(tmp_path: Path) -> None:
    other = another_release(tmp_path, "raise ImportError('the other one is broken')")
    message = r"^ImportError: the other one is broken$"
    with pytest.raises(ContestantError, match=message), Side(other) as side:
        side.set_up(Budget(300, {"all": 1})["all"])


class FakeSide(Side):
    """Answers at once: `rate` rows a second for microbatches of so many rows, `loss`, and a peak for each row."""

    def __init__(self, name: str, rate: Callable[[int], float], loss: float = 1.0, row_bytes: int = 0) -> None:
        super().__init__(Contestant(name, REQUEST, modes=("sync",), settings="fake"), ready=Ready(1, 0.0, 1.0, 0.0))
        self.rate, self.loss, self.row_bytes = rate, loss, row_bytes
        self.asked: list[Lap] = []

    def __enter__(self) -> FakeSide:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_up(self, deadline: Deadline) -> Ready:
        assert self.ready is not None
        return self.ready

    def ask(self, lap: Lap, deadline: Deadline) -> LapResult | None:
        self.asked.append(lap)
        rows = lap.rows // lap.microbatches
        self.losses = [self.loss] * lap.steps
        self.peak_bytes = 100 + rows * self.row_bytes
        return LapResult(lap.steps * lap.rows / self.rate(rows), self.losses, self.peak_bytes)


FOREVER = Budget(1e9, {"all": 1})["all"]


def test_who_starts_again_has_learnt_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ran out of memory is a new one, whose weights are to be those of the old one."""
    told: list[int] = []

    class Server:
        def __init__(self, *_: object) -> None:
            told.append(0)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None: ...

        def set_up(self, timeout_s: float) -> Ready:
            return Ready(1, 0.0, 1.0, 0.0)

        def train(self, lap: Lap, timeout_s: float) -> LapResult:
            told.append(lap.tokens)
            return LapResult(None if lap.tokens > 100 else 1.0, [1.0] * lap.steps)

    monkeypatch.setattr("support.comparison.TrainingServer", Server)
    with Side(Contestant("a", REQUEST)) as side:
        side.set_up(FOREVER)
        assert side.first_losses(32, FOREVER) == [1.0] * 3
        assert side.ask(Lap(1, 200, 1, "sync", 0, 1), FOREVER) is None
        assert side.ask(Lap(1, 64, 1, "sync", 0, 1), FOREVER) is not None
    assert told == [0, 32, 200, 0, 32, 64]


def test_the_best_setting_is_the_quickest_that_fits() -> None:
    most_at_once = FakeSide("a", lambda rows: rows, row_bytes=10)
    assert best_setting(most_at_once, Size(8, 32), 0, FOREVER) == Setting(1, "layers")
    # 100 and 10 for each row: eight rows take 180 of 150, and four 140, which is more than 0.92 of it.
    assert best_setting(most_at_once, Size(8, 32), 150, FOREVER) == Setting(4, "layers")
    small_ones = FakeSide("b", lambda rows: 9 - rows)
    assert best_setting(small_ones, Size(8, 32), 0, FOREVER) == Setting(8, "layers")
    # A larger batch follows from what is known: microbatches have twice as many rows where the batch was the limit.
    known = (Size(8, 32), Setting(1, "layers"))
    assert best_setting(most_at_once, Size(32, 32), 0, FOREVER, known) == Setting(2, "layers")
    # Sixteen rows take 260.
    assert best_setting(most_at_once, Size(32, 32), 290, FOREVER, known) == Setting(2, "layers")
    assert best_setting(most_at_once, Size(32, 32), 270, FOREVER, known) == Setting(4, "layers")
    small_ones.asked.clear()
    known = (Size(8, 32), Setting(8, "layers"))
    assert best_setting(small_ones, Size(32, 32), 0, FOREVER, known) == Setting(32, "layers")
    assert not small_ones.asked


def test_losses_that_differ_are_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, other = FakeSide("ours", lambda rows: rows), FakeSide("the other one", lambda rows: rows, loss=1.5)
    monkeypatch.setattr(kit, "Side", lambda contestant: {"ours": ours, "the other one": other}[contestant.name])
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "gpu" / "kit.py")])
    out = tmp_path / "report.md"
    report = Report("test", out)
    sides = (ours.contestant, [other.contestant])
    assert not kit.report_throughput(report, *sides, [Size(4, 32)], 0, 1e-4, True, FOREVER)
    assert "the other one" not in {row[0] for row in rows(out.read_text(), "Tokens a second")}
    assert "- the other one: no more figures: its losses of three steps that learn differ by 3.3e-01" in out.read_text()
    report.close()


def test_ours_goes_on_when_the_time_of_another_is_over() -> None:
    ours, other = FakeSide("ours", lambda rows: rows), FakeSide("the other one", lambda rows: rows)
    arguments = ((ours, other), (Setting(1, "layers"), Setting(1, "layers")), Size(4, 32), "sync", 1, 3)
    over = Budget(0, {"all": 1})["all"]
    with pytest.raises(ContestantError, match="share of the time was over"):
        compare(*arguments, (FOREVER, over))
    assert not ours.asked
    assert len(compare(*arguments, (FOREVER, FOREVER)).rates[0]) == 3


def test_a_row_is_in_the_file_when_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "gpu" / "kit.py")])
    out = tmp_path / "report.md"
    report = Report("test", out)
    report.header(["a", "b"])
    report.row(["1", "2"])
    assert out.read_text().endswith("| a | b |\n|---:|---:|\n| 1 | 2 |\n")
    assert "\n- commit: " in out.read_text() and "\n- command: `" in out.read_text()
    report.close()


def test_the_longest_row_is_searched_from_the_published_one() -> None:
    class Capped(FakeSide):
        def ask(self, lap: Lap, deadline: Deadline) -> LapResult | None:
            return None if lap.tokens > self.row_bytes else super().ask(lap, deadline)

    grid = [4, 8, 16, 32]
    for most, expected in ((3, (0, 4)), (4, (4, 8)), (20, (16, 32)), (99, (32, 0))):
        found = longest_row(Capped("a", lambda rows: rows, row_bytes=most), grid, 16, FOREVER)
        assert (found.tokens, found.refused, found.ended) == (*expected, "")


def test_rows_that_trained_count_when_a_longer_one_is_stopped() -> None:
    class Stopped(FakeSide):
        def ask(self, lap: Lap, deadline: Deadline) -> LapResult | None:
            if lap.tokens > self.row_bytes:
                raise ContestantError(f"at 1 x {lap.tokens} tokens: stopped")
            return super().ask(lap, deadline)

    found = longest_row(Stopped("a", lambda rows: rows, row_bytes=16), [8, 16, 32], 16, FOREVER)
    assert (found.tokens, found.refused, found.ended) == (16, 0, "at 1 x 32 tokens: stopped")
    with pytest.raises(ContestantError, match="at 1 x 16 tokens"):
        longest_row(Stopped("a", lambda rows: rows, row_bytes=8), [8, 16, 32], 16, FOREVER)


def test_frozen_weights_that_layers_share_move_as_if_they_were_their_own() -> None:
    """So that a machine with less memory shows what the links of the real model take."""
    moved = []
    for shared in (False, True):
        request = replace(
            *(REQUEST,),
            way="followed",
            shape="tiny-moe",
            layers=4,
            lora_rank=2,
            shared_base=shared,
            grain="layer",
            device="virtual:1,memory=1GB,resident=0",
        )
        trainer: Any = make_trainer(request)
        # Stages of one's own: those that are planned follow times that are measured.
        last, plan = trainer._model.num_layers - 1, ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = [range(last)], [range(last, last + 1), range(last)]
        trainer._model.model_run_config.execute_plan = plan
        trainer.train(2, False)
        before = trainer.uploaded_bytes()
        trainer.train(1, False)
        moved.append(trainer.uploaded_bytes() - before)
    assert moved[0] == moved[1] > 0


def test_a_profile_tells_kinds_gaps_and_copies() -> None:
    trace = [
        {"ph": "X", "cat": "kernel", "name": "sm90_gemm", "ts": 0, "dur": 4000},
        {"ph": "X", "cat": "kernel", "name": "flash_fwd", "ts": 2000, "dur": 4000},
        {"ph": "X", "cat": "kernel", "name": "vectorized_elementwise_kernel", "ts": 9000, "dur": 1000},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0, "dur": 1000, "args": {"bytes": 50_000_000}},
        {"ph": "M", "name": "process_name"},
    ]
    seen = summary(*events_of(trace))
    assert (seen["span_ms"], seen["busy_ms"], seen["longest_gap_ms"]) == (10, 7, 3)
    assert sorted(seen["kinds"]) == [("attention", 4, 1), ("element-wise", 1, 1), ("products", 4, 1)]
    assert seen["copies"] == [("up", 1, 0.05, 50)]


def test_the_arithmetic_of_a_step_by_hand() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration("tiny", 32))
    width, queries, keys, middle, vocabulary, layers = 64, 4 * 16, 2 * 16, 96, 512, 4
    weights = layers * (width * queries + 2 * width * keys + queries * width + 3 * width * middle) + vocabulary * width
    flops = step_flops(model)
    assert flops.per_token == 6 * weights
    # Two products of the width of all heads, over half of the row, two operations each, three times.
    assert flops.of_rows(3, 10) == 3 * 10 * (6 * weights + layers * 2 * queries * 10 / 2 * 2 * 3)


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
