"""Each row of the README's claims and of docs/evidence/claims.md says where, when and with what its figure came about.

A row has its devices, host memory and settings, the kind and the date of its evidence, and its command. A report that
it links has that date, and begins with its command. Commands are those of programs that exist, with options that they
take; test_bench.py and test_kit.py run the programs in their small form. What `roundpipe plan`
predicts stands in the row that names it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_bench import NAMES
from typer.testing import CliRunner

from roundpipe.cli import app

ROOT = Path(__file__).resolve().parents[3]
README, CLAIMS = ROOT / "README.md", ROOT / "docs" / "evidence" / "claims.md"
PLACE, EVIDENCE, COMMAND = "devices; host; settings", "evidence", "command"
KIND = re.compile(r"(measured on a card|measured on CPU|emulated|predicted), (\d{4}-\d\d-\d\d)")
NOT_MEASURED = "not measured yet"
LINK = re.compile(r"\]\(([^)#]+)")
CODE = re.compile(r"`([^`]+)`")
PRESETS = ["qwen3-1.7b", "llama3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora"]
# What stands for something else in the commands of the pages.
STANDS_FOR = {
    "CARDS": "cuda:0,cuda:1",
    "PUBLISHED": "published",
    "DEEPSPEED": "deepspeed",
    "TORCHAO": "torchao",
    "BITSANDBYTES": "bitsandbytes",
}
PROGRAMS = {f"bench/{name}.py" for name in [*NAMES, "gpu/kit"]}


@dataclass(frozen=True)
class Row:
    page: Path
    line: int
    cells: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def evidence(self) -> str:
        return self.cells.get(EVIDENCE, "")

    @property
    def measured(self) -> bool:
        return not self.evidence.startswith(NOT_MEASURED)

    @property
    def report(self) -> Path | None:
        links = [target for target in LINK.findall(self.evidence) if "bench/results/" in target]
        return self.page.parent / links[0] if links else None

    @property
    def commands(self) -> list[str]:
        """In the column for it; without one, in the report, or beside the evidence if there is none."""
        if COMMAND in self.cells:
            return CODE.findall(self.cells[COMMAND])
        if self.report is not None and self.report.exists():
            return CODE.findall(head(self.report)[COMMAND])
        return CODE.findall(self.evidence)

    @property
    def ours(self) -> str:
        return self.cells.get("ours") or self.cells["figure"]

    @property
    def figures(self) -> str:
        """All cells before the place, without the first, which names the claim."""
        names = list(self.cells)
        return " ".join(self.cells[name] for name in names[1 : names.index(PLACE)])


def head(report: Path) -> dict[str, str]:
    """The lines `- name: value` with which a report begins; those that are missing are empty."""
    found = dict(re.findall(r"^- ([\w ]+): (.*)$", report.read_text().partition("\n\n")[2].partition("\n\n")[0], re.M))
    return {"date": "", COMMAND: ""} | found


def tables(page: Path, text: str) -> Iterator[list[Row]]:
    header: list[str] = []
    rows: list[Row] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            if rows:
                yield rows
            header, rows = [], []
        elif not header:
            header = cells
        elif not set(line) <= set("|-: "):
            rows.append(Row(page, number, dict(zip(header, cells, strict=True))))


def claims_of_readme() -> list[Row]:
    text = README.read_text()
    before, title, after = text.partition("\n## What is proven, and how\n")
    blank = "\n" * (before + title).count("\n")
    (table,) = tables(README, blank + after.partition("\n## ")[0])
    return table


ROWS = [*claims_of_readme(), *(row for table in tables(CLAIMS, CLAIMS.read_text()) for row in table)]


def problems(row: Row) -> list[str]:
    found = [f"no column '{name}'" for name in (PLACE, EVIDENCE) if name not in row.cells]
    if found:
        return found
    if row.page == CLAIMS and COMMAND not in row.cells:
        found.append(f"no column '{COMMAND}'")
    place = [part.strip() for part in row.cells[PLACE].split(";", 2)]
    if len(place) < 3 or not all(place):
        found.append(f"'{row.cells[PLACE]}' is not devices; host; settings")
    else:
        devices, host, settings = place
        if not re.search(r"\d|^any$|^none$", devices):
            found.append(f"'{devices}' does not say which devices")
        if not (re.search(r"\d GB|^any$", host) or (host == "-" and not row.measured)):
            found.append(f"'{host}' does not say how much host memory")
        if settings == "-":
            found.append("no settings")
    kind = KIND.search(row.evidence)
    if row.measured and kind is None:
        found.append(f"'{row.evidence}' has no kind of evidence with its date")
    if row.report is not None:
        if not row.report.exists():
            found.append(f"there is no {row.report.name}")
        elif not all(head(row.report)[name] for name in ("date", COMMAND)):
            found.append(f"{row.report.name} has no date or no command")
        elif kind is not None and head(row.report)["date"] != kind[2]:
            found.append(f"{row.report.name} is of {head(row.report)['date']}")
    elif row.measured and kind is not None and kind[1] != "predicted":
        found.append("what was run has no report")
    return found if row.commands else [*found, "no command"]


def test_every_row_says_where_when_and_how() -> None:
    assert {row.name: found for row in ROWS if (found := problems(row))} == {}


GOOD = next(row for row in ROWS if row.page == CLAIMS and row.report is not None)


CHANGES = [
    {PLACE: "8; any"},
    {PLACE: "some; any; 16 microbatches"},
    {PLACE: "8; -; 16 microbatches"},
    {PLACE: "8; plenty; 16 microbatches"},
    {PLACE: "8; any; -"},
    {EVIDENCE: "predicted"},
    {EVIDENCE: "emulated, 2026-11-23"},
    {EVIDENCE: GOOD.evidence.replace(f"{KIND.findall(GOOD.evidence)[0][1]}]", "2026-01-01]")},
    {EVIDENCE: GOOD.evidence.replace(".md", "-gone.md")},
    {COMMAND: "no program yet"},
]


def test_a_row_that_leaves_something_out_is_found() -> None:
    assert problems(GOOD) == []
    for change in CHANGES:
        assert problems(replace(GOOD, cells=GOOD.cells | change)), change


# Runs each program up to its options, with those that are given, in one process.
UP_TO_THE_OPTIONS = """
import argparse, json, os, runpy, sys
parse = argparse.ArgumentParser.parse_args
class Parsed(Exception): pass
def parse_and_stop(self, *arguments):
    parse(self, *arguments)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_and_stop
for program, *options in json.load(sys.stdin):
    sys.argv, sys.path[0] = [program, *options], os.path.dirname(os.path.abspath(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except Parsed:
        continue
    except SystemExit:
        pass
    print(program, *options)
"""


def words_of(command: str) -> list[str]:
    return [STANDS_FOR.get(word, word) for word in shlex.split(command)]


@pytest.mark.long
def test_commands_are_those_of_programs_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    benchmarks: list[list[str]] = []
    for row in ROWS:
        for command in row.commands:
            match words_of(command):
                case ["python", program, *options]:
                    assert program in PROGRAMS, f"{row.name}: no test runs {program} in its small form"
                    benchmarks.append([program, *options])
                case ["make", target, *variables]:
                    assert f"\n{target}:" in makefile, row.name
                    for name in (variable.partition("=")[0] for variable in variables):
                        assert f"\n{name} ?=" in makefile, f"{row.name}: {name}"
                case ["roundpipe", "plan", *_]:
                    pass  # run below
                case _:
                    pytest.fail(f"{row.name}: {command}")
    unique = [list(words) for words in dict.fromkeys(tuple(words) for words in benchmarks)]
    done = subprocess.run(
        [sys.executable, "-c", UP_TO_THE_OPTIONS],
        input=json.dumps(unique),
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stderr


# --- What the command line predicts ---


@functools.cache
def run(command: str) -> str:
    _, *words = words_of(command)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the current folder, those of the published models, with their configurations, and a machine's FILE."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from support.published_models import MODELS
    from what_fits import DESCRIBED

    for name, model in MODELS.items():
        model.config().save_pretrained(tmp_path / name)
    DESCRIBED.save(tmp_path / "FILE")
    monkeypatch.chdir(tmp_path)


PREDICTED = [(row, command) for row in ROWS for command in row.commands if command.startswith("roundpipe ")]
IN_EVERY_RUN = {
    "roundpipe plan llama3.1-8b --mode sync --microbatches 16 --compare all",
    "roundpipe plan Qwen3-32B --devices 1 --memory 24GB --microbatches 16",
}
# Other versions of transformers may hold a little more or less while a layer runs.
NEAR = 0.02


def cases(*, compared: bool) -> list[Any]:
    return [
        pytest.param(row, command, id=row.name, marks=() if command in IN_EVERY_RUN else pytest.mark.long)
        for row, command in PREDICTED
        if ("--compare" in command) == compared
    ]


@pytest.mark.usefixtures("model_folders")
@pytest.mark.parametrize(("row", "command"), cases(compared=False))
def test_a_row_of_memory_has_the_plan_s_figures(row: Row, command: str) -> None:
    memory = json.loads(run(f"{command} --json"))["memory"]
    assert memory["fits"]
    for place, text in (("device", row.ours), ("host", row.cells[PLACE].split(";")[1])):
        figures = [float(figure.replace(",", "")) for figure in re.findall(r"([\d.,]+) GB", text)]
        parts = memory[f"predicted_{place}_bytes"]
        predicted = (parts["together"] - parts.get("resident", 0)) / 1e9  # what stays has room that nothing else needs
        assert any(figure == pytest.approx(predicted, rel=NEAR) for figure in figures), (place, predicted)


@pytest.mark.long
@pytest.mark.parametrize(("row", "command"), cases(compared=True))
def test_a_row_of_bubbles_has_the_simulator_s_figures(row: Row, command: str) -> None:
    printed: dict[str, list[str]] = {}
    for preset in PRESETS if "PRESET" in command else [""]:
        for schedule in json.loads(run(f"{command.replace('PRESET', preset)} --json"))["schedules"]:
            printed.setdefault(schedule["schedule"], []).append(f"{schedule['bubble_percent']:.1f}")
    assert " / ".join(printed["roundpipe"]) in row.ours
    assert set(re.findall(r"\d+\.\d+", row.figures)) <= {figure for figures in printed.values() for figure in figures}


def alike(line: str, other: str) -> bool:
    """The same words, and numbers that are near."""

    def number(word: str) -> float | str:
        try:
            return float(word.replace(",", ""))
        except ValueError:
            return word

    words, others = ([number(word) for word in text.split()] for text in (line, other))
    return len(words) == len(others) and all(
        a == pytest.approx(b, rel=NEAR) if isinstance(a, float) and isinstance(b, float) else a == b
        for a, b in zip(words, others, strict=True)
    )


@pytest.mark.usefixtures("model_folders")
def test_the_sample_is_what_the_command_prints() -> None:
    command = "roundpipe plan Qwen3-32B --train lora --devices 1 --memory 24GB --host-memory 128GB"
    printed = run(command).splitlines()
    sample = (ROOT / "docs" / "planner.md").read_text().partition(f"```\n{command}\n```\n\n```\n")[2]
    shown = sample.partition("\n```")[0].splitlines()
    assert len(shown) > 5
    at = 0
    for line in shown:
        at += next(n for n, other in enumerate([*printed[at:], line], start=1) if alike(line, other))
    assert at <= len(printed), shown


@pytest.mark.long
def test_the_command_of_the_picture(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```\n(python bench/emulate.py --picture .*?)\n```$", CLAIMS.read_text(), re.M)
    picture = tmp_path / "timeline.png"
    words = shlex.split(command.replace("docs/images/timeline.png", str(picture)))[1:]
    done = subprocess.run([sys.executable, *words, "--quick"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
