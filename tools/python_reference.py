"""Writes docs/reference/python.md: what Python programs use, from signatures and docstrings.

python tools/python_reference.py

The page has what `import roundpipe` offers, the optimizers, and whatever else the blocks of the guides import. Nothing
is imported to make it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python"
PAGE = ROOT / "docs" / "reference" / "python.md"
HEAD = """# Reference of the Python package

What `import roundpipe` offers, then what lies in its modules, as far as the guides use it. This page is made from
signatures and docstrings by `tools/python_reference.py`.
"""
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.M | re.S)
PAGES = re.compile(r"`?docs/(\w+/)?([\w-]+\.md)`?")
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
FIELD = re.compile(r"^(\*{0,2}\w[\w, *]*): (.*)$")
WIDTH = 100
Definition = ast.FunctionDef | ast.ClassDef


def file_of(module: str) -> Path | None:
    path = PACKAGE / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@dataclass
class Found:
    """A definition and the module that has it."""

    module: str
    node: Definition


def imports_of(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """By name: the module that it is imported from, and its name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def find(module: str, name: str) -> Found | None:
    """Where a name is defined, followed through imports."""
    file = file_of(module)
    if file is None:
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name and not has(node, "overload"):
            return Found(module, node)
    other = imports_of(tree).get(name)
    return find(*other) if other and other[0].startswith("roundpipe") else None


def has(node: Definition, decorator: str) -> bool:
    return any(decorator in ast.unparse(each) for each in node.decorator_list)


def literal(module: str, name: str) -> object:
    """The literal that a module assigns to a name."""
    file = file_of(module)
    assert file is not None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"[reference] {module} assigns no {name}, expected a literal")


# --- What is shown ---


def arguments_of(node: ast.FunctionDef) -> list[str]:
    """Each argument as code has it."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults))
    shown = [_argument(each, value) for each, value in zip(plain, [*defaults, *given.defaults], strict=True)]
    if given.vararg:
        shown.append("*" + _argument(given.vararg, None))
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_argument(each, value) for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return shown + (["**" + _argument(given.kwarg, None)] if given.kwarg else [])


def _argument(each: ast.arg, value: ast.expr | None) -> str:
    kind = f": {ast.unparse(each.annotation)}" if each.annotation else ""
    equals = " = " if kind else "="
    return each.arg + kind + (f"{equals}{ast.unparse(value)}" if value is not None else "")


def signature(node: ast.FunctionDef, name: str, *, method: bool) -> str:
    """As it stands in the code, one argument a line if it is long."""
    shown = arguments_of(node)[1 if method and not has(node, "staticmethod") else 0 :]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){returns}"


def prose(text: str | None) -> str:
    """A Google-style docstring as Markdown."""
    lines, shown, inside = inspect.cleandoc(text or "").splitlines(), [], False
    for line in lines:
        if head := SECTION.match(line):
            inside = True
            shown.append(f"**{head[1]}:**")
            shown.append("")
        elif inside and line.startswith("    ") and not line.startswith("     "):
            field = FIELD.match(line.strip())
            shown.append(
                f"- `{field[1]}`: {field[2]}" if field else f"- {line.strip()}" if shown[-1] == "" else line[2:]
            )
        elif inside and line.startswith("     "):
            shown.append("  " + line.strip())
        else:
            inside = inside and not line.strip()
            shown.append(line)
    return PAGES.sub(r"[\2](../\1\2)", "\n".join(shown)).strip()


def members(found: Found, seen: set[str]) -> Iterator[tuple[str, str, Found]]:
    """Public methods with the class that has them, those of bases of ours after the class's own."""
    node = found.node
    assert isinstance(node, ast.ClassDef)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name not in seen and not has(each, "overload"):
            seen.add(each.name)
            if not each.name.startswith("_") and ast.get_docstring(each) and not has(each, "setter"):
                yield each.name, f"{found.module}.{node.name}", Found(found.module, each)
    for base in node.bases:
        parent = find(found.module, ast.unparse(base).partition("[")[0])
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            yield from members(parent, seen)


def constructor(found: Found) -> str:
    node = found.node
    assert isinstance(node, ast.ClassDef)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return signature(each, node.name, method=True)
    if has(node, "dataclass"):
        lines = [
            f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}"
            + (f" = {ast.unparse(each.value)}" if each.value else "")
            for each in node.body
            if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
        ]
        return f"{node.name}(\n" + "".join(f"{line},\n" for line in lines) + ")" if lines else f"{node.name}()"
    for base in node.bases:
        parent = find(found.module, ast.unparse(base).partition("[")[0])
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            return constructor(parent).replace(parent.node.name, node.name, 1)
    return f"class {node.name}"


def entry(name: str, found: Found, shown: dict[tuple[str, str], str]) -> Iterator[str]:
    """`shown`: the entries in which inherited methods stand already, by their class and name."""
    yield f"### `{name}`"
    if isinstance(found.node, ast.FunctionDef):
        yield f"```python no-run\n{signature(found.node, name, method=False)}\n```"
        yield prose(ast.get_docstring(found.node))
        return
    yield f"```python no-run\n{constructor(found)}\n```"
    yield prose(ast.get_docstring(found.node))
    elsewhere: dict[str, list[str]] = {}
    for method, owner, part in members(found, {"__init__"}):
        assert isinstance(part.node, ast.FunctionDef)
        first = shown.setdefault((owner, method), name)
        if first != name:
            elsewhere.setdefault(first, []).append(f"`{method}`")
            continue
        if has(part.node, "property"):
            yield f"**`{name}.{method}`**" + (f" `{ast.unparse(part.node.returns)}`" if part.node.returns else "")
        else:
            yield f"```python no-run\n{signature(part.node, f'{name}.{method}', method=True)}\n```"
        yield prose(ast.get_docstring(part.node))
    for first, methods in elsewhere.items():
        yield f"As `{first}`: {', '.join(methods)}."


# --- What is public ---


def imported_by_guides() -> dict[str, set[str]]:
    """By module, the names that the blocks of README.md and the other pages import from the package's modules."""
    found: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("**/*.md")} - {PAGE})]:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roundpipe."):
                    found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def page() -> str:
    public = literal("roundpipe", "_PUBLIC")
    assert isinstance(public, dict)
    rules = literal("roundpipe.optim", "__all__")
    assert isinstance(rules, list)
    modules: dict[str, list[str]] = {"roundpipe": sorted(public), "roundpipe.optim": sorted(rules)}
    for module, used in sorted(imported_by_guides().items()):
        if module not in modules:
            modules[module] = sorted(used)
    parts = [HEAD.strip()]
    shown: dict[tuple[str, str], str] = {}
    for module, names in modules.items():
        places = [(name, f"roundpipe.{public[name]}" if module == "roundpipe" else module) for name in names]
        entries = [(name, found) for name, place in places if (found := find(place, name)) is not None]
        if entries:
            parts.append(f"## {module}")
            parts += [part for name, found in entries for part in entry(name, found, shown) if part]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
