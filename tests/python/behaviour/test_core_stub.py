"""The types of the C++ engine in _core.pyi name exactly what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import roundpipe
from roundpipe import _core

STUB = ast.parse((Path(roundpipe.__file__).parent / "_core.pyi").read_text())
# What pybind11 gives every class, or every enumeration, by itself.
GIVEN = {"__init__", "name", "value"}


def named(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def aliases(body: list[ast.stmt]) -> set[str]:
    """Names of types that only the stub knows."""
    return {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "TypeAlias"
    }


def test_the_module() -> None:
    public = {name for name in vars(_core) if not name.startswith("__")}
    assert named(STUB.body) - aliases(STUB.body) == public


@pytest.mark.parametrize("stub", [node for node in STUB.body if isinstance(node, ast.ClassDef)], ids=lambda n: n.name)
def test_a_class(stub: ast.ClassDef) -> None:
    has = {name for name in vars(getattr(_core, stub.name)) if not name.startswith("_")}
    says = {name for name in named(stub.body) if not name.startswith("__")}
    assert has - GIVEN == says - GIVEN
    assert all(hasattr(getattr(_core, stub.name), name) for name in named(stub.body))


def test_a_value_shows_its_attributes_and_keeps_them() -> None:
    value = _core.LayerBytes(weights=1, gradients=2, sums=3, rounded=4)
    assert repr(value) == "LayerBytes(weights=1, gradients=2, sums=3, rounded=4)"
    with pytest.raises(AttributeError):
        value.weights = 5
