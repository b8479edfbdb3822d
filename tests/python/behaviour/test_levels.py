"""Rooms use only rooms above them, nothing goes in circles, and no room is overfull; and that a mistake is found.

The engine is at the bottom, for programs in C++ and Python alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from levels import MOST_UNITS, cpp_problems, python_problems

ROOT = Path(__file__).parents[3]
TABLES = """
| folder | what it is |
|---|---|
| `roundpipe/low/` | |
| `roundpipe/high/` | |
| `python/src/` | |
| `python/roundpipe/` | |

| room | what it is |
|---|---|
| `python/roundpipe/low/` | |
| `python/roundpipe/high/` | |
| `python/roundpipe/cli.py` | |
"""
SOUND = {
    "CONTRIBUTING.md": TABLES,
    "roundpipe/low/a.h": "",
    "roundpipe/low/inside/b.h": "#include <roundpipe/low/a.h>\n",
    "roundpipe/high/c.cpp": "#include <roundpipe/low/inside/b.h>\n#include <vector>\n",
    "python/src/module.cpp": "#include <roundpipe/high/c.h>\n",
    "python/roundpipe/__init__.py": '_PUBLIC = {"Model": "high.model"}\nfrom roundpipe.high.model import Model\n',
    "python/roundpipe/cli.py": "from roundpipe import Model\n",
    "python/roundpipe/old.py": '"""Where it was."""\nfrom roundpipe.high.model import Model as Model\n',
    "python/roundpipe/low/__init__.py": "",
    "python/roundpipe/low/a.py": "import torch\n",
    "python/roundpipe/low/b.py": "from roundpipe.low import a\n",
    "python/roundpipe/high/__init__.py": "",
    "python/roundpipe/high/model.py": "from roundpipe.low.b import anything\n",
}


def test_the_engine() -> None:
    problems = cpp_problems(ROOT)
    assert not problems, "\n".join(problems)


def test_messages_of_the_engine_fit_programs_of_both_languages() -> None:
    of_python = re.compile(r'"[^"]*(RoundPipeRunConfig|optim_parameters|loss_fn|num_microbatch=|=True)')
    for source in sorted((ROOT / "roundpipe").rglob("*.cpp")):
        for line in source.read_text().splitlines():
            assert not of_python.search(line), f"{source.relative_to(ROOT)}: {line.strip()}"


def test_the_python_package() -> None:
    problems = python_problems(ROOT)
    assert not problems, "\n".join(problems)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MODEL = "from roundpipe.high.model import Model\n"
MISTAKES = {
    "an include": ({"roundpipe/low/a.h": "#include <roundpipe/high/c.h>\n", "roundpipe/high/c.h": ""}, "stands below"),
    "headers in a circle": (
        {
            "roundpipe/low/a.cpp": "#include <roundpipe/low/d.h>\n",
            "roundpipe/low/d.h": "#include <roundpipe/low/a.h>\n",
        },
        "a circle: roundpipe/low/a.cpp:1 uses roundpipe/low/d.h; roundpipe/low/d.h:1 uses roundpipe/low/a.h",
    ),
    "an unlisted folder": ({"roundpipe/new/e.h": ""}, "roundpipe/new/e.h is in no room"),
    "too many headers": ({f"roundpipe/low/x{i}.h": "" for i in range(MOST_UNITS)}, "roundpipe/low/ has 17 units"),
    "a room that is gone": ({"CONTRIBUTING.md": TABLES + "| `python/roundpipe/gone/` | |\n"}, "holds no source"),
    "an import": ({"python/roundpipe/low/a.py": MODEL}, "low/a.py:1 uses python/roundpipe/high/model.py, but"),
    "a public name": ({"python/roundpipe/low/a.py": "from roundpipe import Model\n"}, "stands below"),
    "an attribute": ({"python/roundpipe/low/a.py": "import roundpipe\nx = roundpipe.Model\n"}, "low/a.py:2 uses"),
    "for a type checker": (
        {"python/roundpipe/low/a.py": f"if TYPE_CHECKING:\n    {MODEL}"},
        "low/a.py:2 uses python/roundpipe/high/model.py",
    ),
    "inside a function": ({"python/roundpipe/low/a.py": f"def f():\n    {MODEL}"}, "low/a.py:2 uses"),
    "relative": ({"python/roundpipe/low/a.py": "from ..high import model\n"}, "low/a.py:1 uses"),
    "by a string": ({"python/roundpipe/low/a.py": 'importlib.import_module("roundpipe.high.model")\n'}, "low/a.py:1"),
    "modules in a circle": ({"python/roundpipe/low/a.py": "from roundpipe.low.b import c\n"}, "a circle: "),
    "a published path": ({"python/roundpipe/high/d.py": "import roundpipe.old\n"}, "which is for scripts only"),
    "code at the top": ({"python/roundpipe/old.py": "x = 1\n"}, "python/roundpipe/old.py is in no room"),
    "an unlisted module": ({"python/roundpipe/new/f.py": ""}, "python/roundpipe/new/f.py is in no room"),
    "too many modules": (
        {f"python/roundpipe/high/x{i}.py": "" for i in range(MOST_UNITS)},
        "python/roundpipe/high/ has 17 units",
    ),
}


def test_a_sound_house(tmp_path: Path) -> None:
    write(tmp_path, SOUND)
    assert cpp_problems(tmp_path) == [] and python_problems(tmp_path) == []


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    files, said = MISTAKES[name]
    write(tmp_path, SOUND | files)
    problems = cpp_problems(tmp_path) + python_problems(tmp_path)
    assert len(problems) == 1 and said in problems[0], problems
