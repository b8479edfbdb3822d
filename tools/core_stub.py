"""Writes python/roundpipe/_core.pyi: the types of the C++ engine's bindings, from the extension as it is built.

python tools/core_stub.py

Needs pybind11-stubgen (`pip install '.[test]'`), and ruff for the layout. Only what C++ cannot say stands in `TYPES`:
first give things their names and types in python/src (py::arg, a cast).
"""

import argparse
import ast
import importlib
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch  # noqa: F401  the extension's libraries
from pybind11_stubgen import CLIArgs, Printer, arg_parser, stub_parser_from_args
from pybind11_stubgen.structs import QualifiedName

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "python" / "roundpipe" / "_core.pyi"
MODULE = "roundpipe._core"
HEAD = "# Types of the C++ engine, made by tools/core_stub.py from python/src. Not a public interface.\n\n"
# pybind11 takes whatever converts; our own code gives what is meant.
WORDS = (
    (r"roundpipe::(?:\w+::)*(\w+)", rf"{MODULE}.\1"),
    (r"\btyping\.SupportsInt( \| typing\.SupportsIndex)?", "int"),
    (r"\btyping\.SupportsFloat( \| typing\.SupportsIndex)?", "float"),
)
# By class, function and parameter; "return" is what a function returns.
_VALUES = "list[typing.Any]"
_OUTPUTS = "list[tuple[list[torch.Tensor], typing.Any]]"
_PASSAGES = "collections.abc.Sequence[Passage | None]"
TYPES: dict[tuple[str, ...], str] = {
    ("ADAPTABLE",): "list[str]",
    ("CallArguments", "__init__", "inputs"): _VALUES,
    ("CallArguments", "__init__", "labels"): _VALUES,
    ("CallArguments", "__init__", "passages"): _PASSAGES,
    ("CallResult", "outputs", "return"): _OUTPUTS,
    ("Capture", "__init__", "other_random_states"): "dict[str, typing.Any]",
    ("Capture", "take_scaler", "later"): "collections.abc.Callable[[], object]",
    ("Capture", "take_plain", "copies"): "CopySteps | None",
    ("Capture", "take_plain", "optimizer"): "TrainedOptimizer | None",
    ("DEFAULT_ARITHMETIC",): 'typing.Literal["exact", "fast"]',
    ("EMBEDDED",): "list[int]",
    ("EvaluationRecord", "metrics", "return"): "dict[str, typing.Any]",
    ("HostPrediction", "rows", "return"): "dict[str, int]",
    ("LossCounts", "load", "state"): "dict[str, typing.Any] | None",
    ("LossCounts", "state", "return"): "dict[str, typing.Any]",
    ("ModelCore", "forward", "return"): _OUTPUTS,
    ("Passage", "with_documents", "of_calls"): "collections.abc.Sequence[Documents | None]",
    ("Passage", "with_documents", "whole"): "Documents | None",
    ("Pipeline", "__init__", "layers"): _VALUES,
    ("Pipeline", "block_parameters", "return"): "list[list[torch.nn.Parameter]]",
    ("SaveWork", "__init__", "run"): "RunFolder | None",
    ("StepRecord", "metrics", "return"): "dict[str, typing.Any]",
    ("StoredCheckpoint", "value", "keys"): _VALUES,
    ("StoredTensor", "shape", "return"): "tuple[int, ...]",
    ("TrainingLoad", "load_copies", "copies"): "CopySteps | None",
    ("TrainingLoad", "load_weights", "fused"): "ModelOptimizer | None",
    ("TrainingLoad", "values", "return"): "dict[str, typing.Any]",
    ("modules_unchanged", "modules"): _VALUES,
    ("modules_unchanged", "snapshots"): "list[tuple[dict[str, typing.Any], ...]]",
    ("own_generator", "return"): "torch.Generator | None",
    ("same_items", "a"): "dict[str, typing.Any]",
    ("same_items", "b"): "dict[str, typing.Any]",
    ("set_saved_by_call", "saved"): "dict[int, typing.Any]",
    ("verify_step", "progress"): "collections.abc.Callable[[int, int], object] | None",
}


def generated() -> str:
    """The stub as it should be, in any layout."""
    logging.disable(logging.ERROR)
    arguments = arg_parser().parse_args([MODULE], namespace=CLIArgs())
    parser = stub_parser_from_args(arguments)
    annotation = parser.parse_annotation_str
    parser.parse_annotation_str = lambda text: annotation(_in_words(text))
    module = parser.handle_module(QualifiedName.from_str(MODULE), importlib.import_module(MODULE))
    parser.finalize()
    printer = Printer(invalid_expr_as_ellipses=True)
    tree = ast.parse("\n".join(printer.print_module(module)))
    tidy = _Tidy()
    text = HEAD + ast.unparse(tidy.visit(tree)) + "\n"
    if tidy.unused:
        raise SystemExit(f"TYPES has {', '.join('.'.join(place) for place in sorted(tidy.unused))}, which nothing has")
    return text


def same(one: str, other: str) -> bool:
    """Whether two stubs differ in their layout at most."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def _in_words(text: str) -> str:
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    return text


class _Tidy(ast.NodeTransformer):
    """Leaves out what says nothing about types, and puts in what `TYPES` says."""

    def __init__(self) -> None:
        self._at: tuple[str, ...] = ()
        self.unused = set(TYPES)

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self._tidy(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        is_enum = any(_name(part) == "__members__" for part in node.body)
        if is_enum:
            node.body = [part for part in node.body if isinstance(part, ast.AnnAssign) and _name(part)[:2] != "__"]
        outer, self._at = self._at, (*self._at, node.name)
        self._tidy(node)
        self._at = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        place = (*self._at, node.name)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        defaults = [None] * (len(every) - len(arguments.kwonlyargs) - len(arguments.defaults)) + arguments.defaults
        defaults += arguments.kw_defaults
        for argument, default in zip(every, defaults, strict=True):
            if argument.annotation is None:
                continue
            said = self._said((*place, argument.arg), argument.annotation)
            if node.name == "__eq__":
                said = "object"
            if isinstance(default, ast.Constant) and default.value is None and "None" not in said:
                said += " | None"
            argument.annotation = ast.parse(said).body[0].value
        if node.returns is not None:
            node.returns = ast.parse(self._said((*place, "return"), node.returns)).body[0].value
        for argument in (arguments.vararg, arguments.kwarg):
            if argument is not None and argument.annotation is None:
                argument.annotation = ast.Name("object")
        node.body = [ast.Expr(ast.Constant(...))]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.parse(self._said((*self._at, _name(node)), node.annotation)).body[0].value
        node.value = None
        return node

    def _said(self, place: tuple[str, ...], annotation: ast.expr) -> str:
        self.unused.discard(place)
        return TYPES.get(place, ast.unparse(annotation))

    def _tidy(self, node: ast.Module | ast.ClassDef) -> None:
        node.body = [self.visit(part) for part in node.body if not _says_nothing(part)] or [ast.Expr(ast.Constant(...))]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", "")


def _says_nothing(node: ast.AST) -> bool:
    """Docstrings, and what every class has."""
    if isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
        return True
    return _name(node) in ("__all__", "__repr__", "__hash__")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    STUB.write_text(generated())
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}") or shutil.which("ruff")
    if ruff is None:
        print("ruff is not installed: run `make format`")
    else:
        subprocess.run([ruff, "format", "--quiet", str(STUB)], check=True)


if __name__ == "__main__":
    main()
