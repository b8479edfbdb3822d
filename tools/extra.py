"""Prints what extras of pyproject.toml ask for, one requirement a line, quoted for a shell."""

import shlex
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for name in sys.argv[1:]:
    print(*(shlex.quote(requirement) for requirement in project["optional-dependencies"][name]), sep="\n")
