"""Reads what includes and imports what, and says where that breaks the rules of CONTRIBUTING.md on rooms.

A room is a folder of sources in one of its two tables, or a file at the top of the engine or of the Python package; a
room may use only rooms that stand above it. A unit is a header with its source, or a Python module. Imports count
wherever they stand: those for type checkers and those inside functions, too.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOST_UNITS = 16
PACKAGE = "python/roundpipe/"

_ROW = re.compile(r"\| `([\w./]+(?:/|\.py)|roundpipe/\w+\.h)` \|")
_INCLUDE = re.compile(r'\s*#\s*include\s*[<"](roundpipe/[^>"]+)[>"]')


@dataclass(frozen=True)
class Arrow:
    """One file uses another. Paths are from the root of the repository."""

    source: str
    line: int
    target: str


def rooms_in(contributing: str) -> tuple[list[str], list[str]]:
    """The rooms of the C++ engine and those of the Python package, lowest first."""
    rooms = [found[1] for line in contributing.splitlines() if (found := _ROW.match(line))]
    python = [room for room in rooms if room.startswith(PACKAGE) and room != PACKAGE]
    return [room for room in rooms if room not in python and room != PACKAGE], python


def unit_of(path: str) -> str:
    """`a/b.h` and `a/b.cpp` are `a/b`."""
    return path.rpartition(".")[0]


# -- C++ --------------------------------------------------------------------------------------------------------------


def cpp_files(root: Path) -> list[str]:
    found = [*root.glob("roundpipe/**/*"), *root.glob("python/src/**/*")]
    return sorted(path.relative_to(root).as_posix() for path in found if path.suffix in (".h", ".cpp", ".cu"))


def cpp_arrows(root: Path, files: list[str]) -> Iterator[Arrow]:
    known = set(files)
    for file in files:
        for number, line in enumerate((root / file).read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.match(line)
            if include and include[1] in known:
                yield Arrow(file, number, include[1])


# -- Python -----------------------------------------------------------------------------------------------------------


@cache
def _parsed(path: Path) -> ast.Module:
    # Python before 3.11.8 may raise SystemError where a collection comes between (python/cpython#106905).
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if collects:
            gc.enable()


def python_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in (root / PACKAGE).glob("**/*.py"))


def is_published_path(root: Path, file: str) -> bool:
    """Whether a module only hands on names of other modules: where the published package has them."""
    body = _parsed(root / file).body
    return any(isinstance(statement, ast.ImportFrom) for statement in body) and all(
        isinstance(statement, ast.ImportFrom)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__")
        for statement in body
    )


def _public_names(root: Path) -> dict[str, str]:
    """Where each name of `roundpipe` itself lives: the table `_PUBLIC` of the package."""
    for statement in _parsed(root / PACKAGE / "__init__.py").body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_PUBLIC":
            table: dict[str, str] = ast.literal_eval(statement.value)
            return {name: f"roundpipe.{module}" for name, module in table.items()}
    return {}


def _dotted_names(node: ast.AST, package: str, public: Mapping[str, str]) -> Iterator[str]:
    """The modules, or names in modules, that a statement or expression asks for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name != "roundpipe")
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            base = ".".join([*package.split(".")[: 1 - node.level or None], *filter(None, [node.module])])
        for alias in node.names:
            whole = public.get(alias.name) if base == "roundpipe" else None
            yield whole or f"{base}.{alias.name}"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "roundpipe":
        yield public.get(node.attr, f"roundpipe.{node.attr}")
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))


def python_arrows(root: Path, files: list[str]) -> Iterator[Arrow]:
    places = {}
    for file in files:
        dotted = unit_of(file).removeprefix("python/").replace("/", ".").removesuffix(".__init__")
        places[dotted] = file
    public = _public_names(root)
    for dotted, file in places.items():
        package = dotted if file.endswith("__init__.py") else dotted.rpartition(".")[0]
        for node in ast.walk(_parsed(root / file)):
            for name in _dotted_names(node, package, public):
                target = places.get(name) or places.get(name.rpartition(".")[0])
                if target not in (None, file, f"{PACKAGE}__init__.py"):
                    yield Arrow(file, node.lineno, target)  # type: ignore[attr-defined]


# -- rules ------------------------------------------------------------------------------------------------------------


def room_of(file: str, rooms: list[str]) -> str | None:
    """The innermost room that holds a file."""
    holding = [room for room in rooms if file == room or (room.endswith("/") and file.startswith(room))]
    return max(holding, key=len, default=None)


def back_arrows(arrows: list[Arrow], rooms: list[str]) -> list[str]:
    problems = []
    for arrow in arrows:
        source, target = room_of(arrow.source, rooms), room_of(arrow.target, rooms)
        if source is None or target is None or rooms.index(target) <= rooms.index(source):
            continue
        problems.append(
            f"{arrow.source}:{arrow.line} uses {arrow.target}, but {target} stands below {source} in the table of "
            "CONTRIBUTING.md, and a room uses only those above it"
        )
    return problems


def circles(arrows: list[Arrow], rooms: list[str]) -> list[str]:
    """Each circle of units in one room once, with a line that makes each of its arrows. Others have a back arrow."""
    uses: dict[str, dict[str, Arrow]] = defaultdict(dict)
    for arrow in arrows:
        inside = room_of(arrow.source, rooms) == room_of(arrow.target, rooms)
        if inside and unit_of(arrow.source) != unit_of(arrow.target):
            uses[unit_of(arrow.source)].setdefault(unit_of(arrow.target), arrow)

    def way(start: str, end: str) -> list[Arrow] | None:
        """The shortest one."""
        ways: dict[str, list[Arrow]] = {start: []}
        waiting = [start]
        for unit in waiting:
            for following, arrow in uses.get(unit, {}).items():
                if following not in ways:
                    ways[following] = [*ways[unit], arrow]
                    waiting.append(following)
        return ways.get(end)

    problems: dict[frozenset[str], str] = {}
    for unit, targets in sorted(uses.items()):
        for target, arrow in targets.items():
            back = way(target, unit)
            if back is not None:
                circle = [arrow, *back]
                members = frozenset(unit_of(each.source) for each in circle)
                lines = "; ".join(f"{each.source}:{each.line} uses {each.target}" for each in circle)
                problems.setdefault(members, f"a circle: {lines}")
    return list(problems.values())


def overfull(files: list[str], rooms: list[str]) -> list[str]:
    """Folders of more than `MOST_UNITS` units; what says what a Python room is does not count."""
    units: dict[str, set[str]] = defaultdict(set)
    for file in files:
        if room_of(file, rooms) is not None and not file.endswith("/__init__.py"):
            units[file.rpartition("/")[0]].add(unit_of(file))
    return [
        f"{folder}/ has {len(found)} units, expected at most {MOST_UNITS}: move some of them to a room of their own"
        for folder, found in sorted(units.items())
        if len(found) > MOST_UNITS
    ]


def unlisted(files: list[str], rooms: list[str]) -> list[str]:
    """Files that are in no room, and rooms that are not there."""
    outside = [
        f"{file} is in no room of the tables in CONTRIBUTING.md: list its folder there, where it may be used from"
        for file in files
        if room_of(file, rooms) is None
    ]
    empty = [
        f"{room} is in a table of CONTRIBUTING.md and holds no source"
        for room in rooms
        if all(room_of(file, rooms) != room for file in files)
    ]
    return outside + empty


def cpp_problems(root: Path) -> list[str]:
    """What is against the rules in the engine and its bindings."""
    rooms, _ = rooms_in((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    files = cpp_files(root)
    arrows = list(cpp_arrows(root, files))
    return [*unlisted(files, rooms), *back_arrows(arrows, rooms), *circles(arrows, rooms), *overfull(files, rooms)]


def python_problems(root: Path) -> list[str]:
    """What is against the rules in the Python package. Modules that only hand names on are exempt, but not for use."""
    _, rooms = rooms_in((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    every = python_files(root)
    exempt = {f"{PACKAGE}__init__.py", f"{PACKAGE}_built_with.py"}
    exempt |= {file for file in every if room_of(file, rooms) is None and is_published_path(root, file)}
    files = [file for file in every if file not in exempt]
    arrows = [arrow for arrow in python_arrows(root, every) if arrow.source in files]
    borrowed = [
        f"{arrow.source}:{arrow.line} uses {arrow.target}, which is for scripts only: import from where it has it"
        for arrow in arrows
        if arrow.target in exempt and not arrow.target.startswith(f"{PACKAGE}_")
    ]
    between = [arrow for arrow in arrows if arrow.target in files]
    return [
        *unlisted(files, rooms),
        *borrowed,
        *back_arrows(between, rooms),
        *circles(between, rooms),
        *overfull(files, rooms),
    ]
