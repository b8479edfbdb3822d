"""What a run shows and leaves to be read: lines, event files, samples, the report."""

from __future__ import annotations

import json
import struct
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roundpipe.performance.pictures import Span
from roundpipe.runs.event_file import EventFile, crc32c
from roundpipe.runs.lines import Lines, read_lines
from roundpipe.train.config import TrainConfig
from roundpipe.train.loop import EvaluationRecord, StepRecord
from roundpipe.train.progress import Screen, duration
from roundpipe.train.report import RunReport, write_report
from roundpipe.train.samples import make_prompts
from roundpipe.train.trackers import All, Metrics, TensorBoard, WeightsAndBiases
from tiny_chat import byte_tokenizer

STEP = StepRecord(
    step=3, loss=1.5, grad_norm=0.25, learning_rate=1e-3, seconds=2.0, tokens=100, busy=0.5, device_bytes=3 * 10**9
)


def test_lines_of_steps_that_are_done_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with Lines(path) as lines:
        for step in range(4):
            lines.write(step, {"loss": float("nan") if step == 1 else step / 3})
    path.open("a").write('{"step": 4, "lo')
    with Lines(path, after_step=2) as lines:
        assert [line["step"] for line in lines.lines] == [0, 1, 2]
        lines.write(3, {"loss": 7.0})
    assert [line["loss"] for line in read_lines(path)] == [0.0, None, 2 / 3, 7.0]


def test_a_full_disk_does_not_end_training(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines.__new__(Lines)
    lines._path, lines.lines, lines._unwritten, lines._complained = Path("/dev/full"), [], b"", False
    lines._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    lines.write(1, {"loss": 1.0})
    lines.write(2, {"loss": 2.0})
    assert capsys.readouterr().err.count("No space left on device; training goes on") == 1
    assert [json.loads(text)["step"] for text in lines._unwritten.splitlines()] == [1, 2]
    lines._file.close()


def records_of(data: bytes) -> list[bytes]:
    """The events of a file, whose checksums must be right."""
    events = []
    while data:
        length = struct.unpack("<Q", data[:8])[0]
        for begin, end in ((0, 8), (12, 12 + length)):
            value = crc32c(data[begin:end])
            masked = ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", data[end : end + 4])[0] == masked
        events.append(data[12 : 12 + length])
        data = data[16 + length :]
    return events


def test_event_files_are_those_of_tensorboard(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the polynomial
    events = EventFile(tmp_path, time_s=1.5)
    events.add(300, {"loss": 0.5}, time_s=2.5)
    events.close()
    first, second = records_of(next(tmp_path.iterdir()).read_bytes())
    # Read by TensorBoard as: wall_time 1.5, file_version; wall_time 2.5, step 300, loss 0.5.
    assert first == b"\x09" + struct.pack("<d", 1.5) + b"\x1a\x0dbrain.Event:2"
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    assert second == b"\x09" + struct.pack("<d", 2.5) + b"\x10\xac\x02" + b"\x2a\x0d\x0a\x0b" + value


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
    events = EventFile(tmp_path / "events")
    wandb = WeightsAndBiases("project", TrainConfig(out="mine", seed=4))
    with Lines(tmp_path / "metrics.jsonl") as lines:
        everything = All([Metrics(lines), TensorBoard(events), wandb])
        everything.on_step(STEP)
        everything.on_evaluation(EvaluationRecord(3, 1.25, 77))
    wandb.close()
    events.close()
    assert (made["project"], made["name"], made["config"]["seed"]) == ("project", "mine", 4)
    assert [entry if entry == "finished" else entry[0] for entry in logged] == [3, 3, "finished"]
    assert logged[0][1]["loss"] == 1.5 and logged[1][1] == {"evaluation_loss": 1.25, "evaluation_tokens": 77}
    step, evaluation = read_lines(tmp_path / "metrics.jsonl")
    assert (step["loss"], step["devices_busy"], evaluation["evaluation_loss"]) == (1.5, 0.5, 1.25)
    written = b"".join(records_of(next((tmp_path / "events").iterdir()).read_bytes()))
    for tag in ("grad_norm", "tokens_per_second", "evaluation_loss"):
        assert tag.encode() in written


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
        "loss 1.5000  norm 0.25  rate 0.001  10 tokens/s  devices 50% busy  3.00 GB a device, 2.00 GB host  3:00 left"
    )
    assert (duration(59.6), duration(3909)) == ("1:00", "1:05:09")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with Screen(steps=5, after_step=2, log_every=1) as screen:
        screen.on_step(STEP)
    shown = capsys.readouterr().out
    assert "3/5" in shown and "loss 1.5000" in shown


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
    assert page.kinds.count("svg") == 7  # six charts and a timeline
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


def test_a_report_of_a_run_without_steps(tmp_path: Path) -> None:
    nothing = RunReport(TrainConfig(), [], [], [], "", "", "", "virtual:1")
    write_report(tmp_path / "report.html", nothing)
    Page((tmp_path / "report.html").read_text())
