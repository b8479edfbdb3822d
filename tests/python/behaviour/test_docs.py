"""Runs the examples of the README and of every page in docs/.

A block that starts with "```python" is a program of its own; one that starts with "```python no-run" is only shown.
Where a block starts with "```python with-model", the test first makes a model in `path/to/model`, with a tokenizer,
and some `batches`. Commands run where their block starts with "```sh run" or "```sh with-model".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import ProgramRunner

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python[ \t]*(?P<flag>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh (?P<flag>run|with-model)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#]+)(#[^)]*)?\)")
# Code, in which a C++ lambda looks like a link.
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


# A translation has the blocks of its page, which are run there.
TRANSLATIONS = sorted((ROOT / "docs" / "zh").glob("*.md"))


# Examples that take a second or more, which `make test-all` runs.
LONG = (
    *("docs/tutorial-chat.md", "docs/any-model.md", "docs/trainer.md", "docs/lora.md", "docs/memory.md"),
    *("docs/following.md", "docs/evidence/plans.md", "docs/evidence/scaling.md", "docs/coming-from.md"),
)


def commands() -> list[tuple[str, str, str]]:
    """(id, flag, code) of every block of commands that runs."""
    return [
        (f"{page.relative_to(ROOT)}:{1 + text.count(chr(10), 0, block.start('code'))}", block["flag"], block["code"])
        for page in PAGES
        if page not in TRANSLATIONS
        for text in [page.read_text()]
        for block in COMMANDS.finditer(text)
    ]


def examples() -> list[tuple[str, str, str]]:
    """(id, flag, code) of every block; the code starts on its own line of the page, so tracebacks point there."""
    found = []
    for page in (page for page in PAGES if page not in TRANSLATIONS):
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            found.append((f"{page.relative_to(ROOT)}:{line + 1}", block["flag"].strip(), "\n" * line + block["code"]))
    return found


EXAMPLES = examples()

# Where the paths of pages begin: `runtime/engine.h`, `gpu/kit.py`, `roundpipe/train/demo/proof.py`.
TOPS = [ROOT, ROOT / "roundpipe", ROOT / "bench", ROOT / "python", ROOT / "python" / "roundpipe"]
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:h|cpp|py|md|toml))`")
# A page as messages, docstrings and comments name it.
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
SOURCES = [
    ROOT / "Makefile",
    *(
        path
        for folder in ("bench", "examples", "programs", "python", "roundpipe", "tests", "tools")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cpp", ".inl")
    ),
]


def test_files_and_links_of_every_page_are_there() -> None:
    lost = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        named = {name for name in NAMED_FILE.findall(text) if not any((top / name).exists() for top in TOPS)}
        links = [link["target"] for link in LINK.finditer(CODE.sub("", text))]
        named |= {link for link in links if "://" not in link and not (page.parent / link).exists()}
        lost += [f"{page.name}: {name}" for name in sorted(named)]
    assert lost == []


def test_pages_that_the_code_names_are_there() -> None:
    named = {name: path for path in SOURCES for name in NAMED_PAGE.findall(path.read_text())}
    assert {name: str(path) for name, path in named.items() if not (ROOT / name).exists()} == {}


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def test_translations_have_their_pages_blocks() -> None:
    for page in TRANSLATIONS:
        original = ROOT / "README.md" if page.name == "README.md" else ROOT / "docs" / page.name
        blocks = FENCED.findall(page.read_text())
        assert blocks and blocks == FENCED.findall(original.read_text()), page.name


def test_the_first_two_sections_are_translated() -> None:
    _, start, train, *_ = (ROOT / "docs" / "README.md").read_text().split("\n## ")
    pages = re.findall(r"^- \[[\w.-]+\]\(([\w.-]+)\)", start + train, re.MULTILINE)
    assert len(pages) > 5
    assert {*pages, "README.md"} == {page.name for page in TRANSLATIONS}


def test_the_glossary_has_forty_nouns_at_most() -> None:
    nouns = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs" / "reference" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(nouns) <= 40 and len({noun.lower() for noun in nouns}) == len(nouns)


def test_the_readme_has_an_example_that_runs() -> None:
    assert any(name.startswith("README.md") and flag != "no-run" for name, flag, _ in EXAMPLES)


def test_flags_are_known() -> None:
    assert {flag for _, flag, _ in EXAMPLES} <= {"", "no-run", "with-model"}


# What a page with the flag "with-model" takes as given. On one line, so that tracebacks keep their lines.
GIVEN = (
    "import tokenizers, torch, transformers; "
    "sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2); "
    "transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained('path/to/model'); "
    "letters = {letter: index for index, letter in enumerate(' abcdefghijklmnopqrstuvwxyz')}; "
    "letters = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])); "
    "special = dict(pad_token='<pad>', eos_token='<eos>'); "
    "transformers.PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained('path/to/model'); "
    "tokens = torch.randint(64, (4, 16)); batches = [{'input_ids': tokens, 'labels': tokens}] * 2; "
)


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        pytest.param(flag, code, id=name, marks=pytest.mark.long if name.startswith(LONG) else ())
        for name, flag, code in EXAMPLES
        if flag != "no-run"
    ],
)
def test_example_runs(flag: str, code: str, runner: ProgramRunner, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text((GIVEN if flag == "with-model" else "") + code)
    result = runner.run(program, cwd=tmp_path, ROUNDPIPE_DEVICES="virtual:2,debug")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "eval mode" not in result.stderr, "an example trains without dropout"


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        pytest.param(flag, code, id=name, marks=pytest.mark.long if name.startswith(LONG) else ())
        for name, flag, code in commands()
    ],
)
def test_commands_run(flag: str, code: str, runner: ProgramRunner, tmp_path: Path) -> None:
    if flag == "with-model":
        (tmp_path / "given.py").write_text(GIVEN)
        assert runner.run(tmp_path / "given.py", cwd=tmp_path).returncode == 0
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "roundpipe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m roundpipe "$@"\n')
    (programs / "roundpipe").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
        "ROUNDPIPE_DEVICES": "virtual:2,debug",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(["sh", "-e", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
