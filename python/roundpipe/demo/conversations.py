"""Conversations about the functions in the files that the demo trains on, made from their docstrings."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from roundpipe.demo.corpus import SourceFile
from roundpipe.files import write_text

# Short enough for a row of the demo.
_LONGEST_ANSWER = 120


def write_conversations(path: Path, files: Iterable[SourceFile]) -> None:
    """Writes a line for each function that has a docstring: what does it do?"""
    lines = []
    for file in files:
        for name, answer in _answers(file):
            question = {"role": "user", "content": f"What does {name} in {_module(file.path)} do?"}
            messages = [question, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))


def _answers(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Each function's name and the first sentence of its docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the sources: invalid escapes
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        sentence = text.partition(". ")[0].rstrip(".")
        if sentence and len(sentence) <= _LONGEST_ANSWER:
            yield node.name, sentence + "."


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
