"""What a run shows and leaves to be read: lines, event files, samples, the report."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roundpipe.checkpoints.runs.lines import Lines, read_lines
from roundpipe.plan.performance.axes import around, tick_label, tick_step, ticks
from roundpipe.plan.performance.pictures import Span
from roundpipe.train.config import TrainConfig
from roundpipe.train.interface.charts import Chart
from roundpipe.train.interface.progress import Screen, StepLine, duration, parts_of
from roundpipe.train.loop import EvaluationRecord, StepRecord
from roundpipe.train.report import RunReport, write_report
from roundpipe.train.samples import make_prompts
from roundpipe.train.trackers import All, Metrics, TensorBoard, WeightsAndBiases
from tiny_chat import byte_tokenizer


def made_step(step: int = 3, loss: float = 1.5) -> StepRecord:
    return StepRecord(step, loss, 0.25, 1e-3, seconds=2.0, tokens=100, busy=0.5, device_bytes=3 * 10**9)


STEP = made_step()


def test_lines_are_read_without_what_is_torn(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl")
    lines.add('{"step": 1, "loss": null}')
    assert lines.lines == [{"step": 1, "loss": None}]
    (tmp_path / "lines.jsonl").open("a").write('{"step": 4, "lo')
    assert read_lines(tmp_path / "lines.jsonl") == lines.lines


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: (step, value) of each curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    for first, value in ((1, 1.0), (2, 0.5)):  # the second run goes on after step 1
        board = TensorBoard(tmp_path, after_step=first - 1)
        for step in (first, first + 1, first + 2):
            board.on_step(made_step(step, value))
        board.close()
        # Event files are ordered by the second of their names.
        (written,) = (path for path in tmp_path.iterdir() if path.name.count(".") > 3)
        written.rename(tmp_path / f"events.out.tfevents.{first}")
    assert scalars_of(tmp_path)["loss"] == [(1, 1.0), (2, 0.5), (3, 0.5), (4, 0.5)]


def test_a_board_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(tmp_path)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board._writer, "add_scalar", fails)
    monkeypatch.setattr(board._writer, "close", fails)
    board.on_step(STEP)
    board.on_step(STEP)
    board.close()
    assert capsys.readouterr().err.count("No space left on device; training goes on") == 1


def test_tensorboard_has_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"^\[train\] --tensorboard needs tensorboard"):
        TensorBoard(tmp_path)


def test_trackers_get_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            logged.append("finished")

    made: dict[str, Any] = {}
    module: Any = types.ModuleType("wandb")
    module.init = lambda **options: made.update(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    board = TensorBoard(tmp_path / "events")
    wandb = WeightsAndBiases("project", TrainConfig(out="mine", seed=4))
    everything = All([Metrics(Lines(tmp_path / "metrics.jsonl")), board, wandb])
    everything.on_step(STEP)
    everything.on_evaluation(EvaluationRecord(3, 1.25, 77))
    wandb.close()
    board.close()
    assert (made["project"], made["name"], made["config"]["seed"]) == ("project", "mine", 4)
    assert [entry if entry == "finished" else entry[0] for entry in logged] == [3, 3, "finished"]
    assert logged[0][1]["loss"] == 1.5 and logged[1][1] == {"evaluation_loss": 1.25, "evaluation_tokens": 77}
    step, evaluation = read_lines(tmp_path / "metrics.jsonl")
    assert (step["loss"], step["devices_busy"], evaluation["evaluation_loss"]) == (1.5, 0.5, 1.25)
    shown = scalars_of(tmp_path / "events")
    assert shown["grad_norm"] == [(3, 0.25)] and shown["tokens_per_second"] == [(3, 50.0)]
    assert shown["evaluation_loss"] == [(3, 1.25)]


def test_weights_and_biases_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        WeightsAndBiases("project", TrainConfig())


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(steps=5, after_step=0, log_every=2) as screen:
        for step in range(1, 6):
            screen.on_step(StepRecord(step, 1.5, 0.25, 1e-3, 60.0, 600, 0.5, 3 * 10**9, 2 * 10**9))
        screen.on_evaluation(EvaluationRecord(5, 1.25, 77))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/5",
        "step 4/5",
        "step 5/5",
        "after 5 steps: held-out loss 1.2500",
    ]
    assert lines[0].endswith(
        "loss 1.5000  10 tokens/s  3:00 left  norm 0.25  rate 0.001  devices 50% busy  3.00 GB a device, 2.00 GB host"
    )
    assert (duration(59.6), duration(3909)) == ("1:00", "1:05:09")


def shown_line(width: int, parts: list[str]) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    return "".join(segment.text for segment in console.render(StepLine(123, 4000, parts)))


PARTS = parts_of(made_step(), left_s=3432, held_out="held out 1.2500")


def test_the_first_parts_of_a_line_matter_most() -> None:
    assert PARTS[:4] == ["loss 1.5000", "50 tokens/s", "57:12 left", "held out 1.2500"]
    assert sorted(PARTS) == sorted([*STEP.text().split("  "), "57:12 left", "held out 1.2500"])
    scaled = StepRecord(3, 1.5, 0.25, 1e-3, seconds=2.0, tokens=100, loss_scale=64.0, skipped_steps=1)
    assert parts_of(scaled, 1)[:2] == PARTS[:2] and "scale 64" in parts_of(scaled, 1)


@pytest.mark.parametrize("width", range(60, 201))
def test_a_line_fits_the_terminal(width: int) -> None:
    line = shown_line(width, PARTS)
    assert len(line) < width
    head, *shown = [part for part in line.split("  ") if part.strip(" ━╸╺")]
    assert head.startswith("step 123/4000")
    assert [part.strip() for part in shown] == PARTS[: len(shown)] and len(shown) >= 3
    if len(shown) < len(PARTS):
        assert len(line) + len("  " + PARTS[len(shown)]) >= width, "there was room for one more"


def test_a_narrow_line_drops_from_the_end() -> None:
    assert "loss 1.5000" in shown_line(40, PARTS) and "left" not in shown_line(40, PARTS)
    assert "step 123/4000" in shown_line(20, PARTS)


def test_a_bar_on_a_terminal_follows_its_width() -> None:
    console = Console(
        file=io.StringIO(), width=200, force_terminal=True, color_system=None, _environ={"TERM": "screen"}
    )
    file: Any = console.file
    with Screen(steps=5, after_step=2, log_every=1, console=console) as screen:
        screen.on_step(STEP)
        screen._live.refresh()
        assert "3/5" in file.getvalue() and "a device" in file.getvalue()
        before = len(file.getvalue())
        console.width = 60
        screen._live.refresh()
        assert "tokens/s" in file.getvalue()[before:] and "a device" not in file.getvalue()[before:]
        screen.on_evaluation(EvaluationRecord(3, 1.25, 77))
        assert "after 3 steps: held-out loss 1.2500" in file.getvalue()


def test_a_terminal_without_a_cursor_gets_lines() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "dumb"})
    file: Any = console.file
    with Screen(steps=5, after_step=2, log_every=1, console=console) as screen:
        screen.on_step(STEP)
    assert file.getvalue().startswith("step 3/5  loss 1.5000  50 tokens/s  0:04 left  norm 0.25")


def test_prompts_are_the_beginnings_of_what_is_held_out() -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer("a text of some length, to go on from")["input_ids"]
    chat = {"input_ids": text, "labels": [-100] * 5 + text[5:]}
    config = TrainConfig(samples=2, sample_tokens=4)
    found = make_prompts(config, tokenizer, [chat, chat, {"input_ids": text, "labels": text}, chat])
    assert [len(prompt.tokens) for prompt in found] == [5, 16]
    assert (found[0].expected, found[1].expected) == ("t of", "engt")
    asked = make_prompts(TrainConfig(sample_prompts=["hello"]), tokenizer, [chat])
    assert tokenizer.decode(asked[0].tokens) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert not make_prompts(TrainConfig(samples=0), tokenizer, [chat])


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 2e-5, ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]),
        (1.62, 5.1, ["1", "2", "3", "4", "5", "6"]),
        (4.0, 5.1, ["4.0", "4.5", "5.0", "5.5"]),
        (0.0, 14300.0, ["0", "5,000", "10,000", "15,000"]),
        (-0.05, 0.31, ["-0.1", "0", "0.1", "0.2", "0.3", "0.4"]),
        (0.0, 3e9, ["0", "1e9", "2e9", "3e9"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    step = tick_step(high - low, 5)
    assert [tick_label(tick, step) for tick in ticks(*around(low, high, step), step)] == labels


def test_steps_are_whole_numbers() -> None:
    assert tick_step(2, 5, whole=True) == 1 and tick_step(1235, 5, whole=True) == 500


def drawn(chart: Chart) -> list[tuple[float, str, str]]:
    """The labels of a chart: where they are, how they are anchored, and what they say."""
    found = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)">([^<]*)</text>', chart.figure())
    return [(float(x), anchor, text) for x, anchor, text in found]


@pytest.mark.parametrize("high", [3e-6, 0.5, 99.0, 65536.0, 1e6])
def test_labels_of_a_chart_are_whole(high: float) -> None:
    chart = Chart("speed", "note", [("a", [(1, high / 3), (4000, high)])])
    width, room = 420, 6.0
    for x, anchor, text in drawn(chart):
        before, after = {"end": (1.0, 0.0), "middle": (0.5, 0.5)}[anchor]
        assert x - before * room * len(text) >= 0 and x + after * room * len(text) <= width, text


def test_a_chart_says_what_it_shows() -> None:
    both = Chart(
        "loss", "should <fall>", [("training", [(1, 2.0)]), ("held out", [(0, 3.0)])], from_zero=False
    ).figure()
    for expected in ("<figcaption>loss", "should &lt;fall&gt;", "training</span>", "held out</span>", ">step</text>"):
        assert expected in both
    assert "legend" not in Chart("norm", "note", [("norm", [(1, 2.0)])]).figure()
    assert Chart("norm", "note", [("norm", [])]).figure() == ""
    assert drawn(Chart("busy", "", [("busy", [(1, 93.0)])], top=100))[5][2] == "100"


PICTURES = 8  # seven charts and a timeline


class Page(HTMLParser):
    """Collects the text of a page and its attributes, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.kinds: list[str] = []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_report_is_one_page_without_the_network(tmp_path: Path) -> None:
    metrics: list[dict[str, Any]] = [{"step": 0, "evaluation_loss": 5.0}]
    metrics += [{"step": step, **STEP.metrics()} for step in range(1, 3000)]
    metrics += [{"step": 2, "loss": None}, {"step": 2999, "evaluation_loss": 4.0}]
    samples = [{"step": step, "prompt": "<b>?", "text": f"answer {step}", "expected": "right"} for step in (0, 9)]
    report = RunReport(
        config=TrainConfig(model="m&m", data=["chat.jsonl"], out="o", lora=True),
        metrics=metrics,
        samples=samples,
        timeline=[Span(0, "forward", 0.0, 1.0, "layer <0>"), Span(1, "backward", 1.0, 4.0, "layer 1")],
        step="limited by links",
        host="moments 3 MiB",
        data="12 records",
        devices="virtual:2",
    )
    write_report(tmp_path / "report.html", report)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not page.links and "http" not in text and "<script" not in text and "url(" not in text
    assert page.kinds.count("svg") == PICTURES
    shown = "\n".join(page.texts)
    for expected in (
        "5.0000 before, 4.0000 after",
        "m&m",
        "<b>?",
        "answer 9",
        "right",
        "limited by links",
        "12 records",
    ):
        assert expected in shown
    for expected in ("moments 3 MiB", "virtual:2", "lora *", "torch", "layer <0>"):
        assert expected in shown
    assert len(text) < 200_000
    looked_at_in_a_browser(tmp_path / "report.html")


def looked_at_in_a_browser(path: Path) -> None:
    """Opens the page without the network in a browser of this machine, if it has one; it must draw and not complain."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        return
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'browser'}", path.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in drawn.stderr
    assert drawn.stdout.count("<svg") == PICTURES and drawn.stdout.rstrip().endswith("</html>")


def test_a_report_of_a_run_without_steps(tmp_path: Path) -> None:
    nothing = RunReport(TrainConfig(), [], [], [], "", "", "", "virtual:1")
    write_report(tmp_path / "report.html", nothing)
    Page((tmp_path / "report.html").read_text())
