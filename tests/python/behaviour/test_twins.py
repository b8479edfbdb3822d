"""What stands in both languages: classes by name, and phrases of messages. Each has a reason, or goes.

A rule has one home, and C++ holds a training. A class or a phrase that comes up here is most likely a rule that was
written twice: give it to C++ and bind it. What is no longer twice has to leave the lists, so they only shrink.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PHRASE_WORDS = 7

# The same thing in both languages, and why Python has a class of it.
FACES = {
    "shows what C++ holds, in Python's types": (
        *("DeviceMemory", "HostArena", "HostMemory", "HostPrediction", "MemoryPrediction", "Nodes", "Save"),
        *("SaveReport", "Loaded", "StoredCheckpoint", "Step", "Pending", "UpdateRule", "Stages", "Timeline"),
        "FusedSteps",
        "JointTraining",
    ),
    "a subclass of torch's class, whose names and arguments it has": ("GradScaler", "EmulatedLayer"),
    "pytrees of Python are more than what TensorsOf knows": ("Structure", "Batch"),
    "models of Python are followed through their own code, those of C++ are its own": ("LanguageModel",),
    "a save, as the steps of Python see it": ("StateReader",),
    "the loop of a command: data and trackers of Python, none of them in C++": (
        *("Training", "RunFolder", "StopSignal"),
    ),
}
# The same word for two things.
HOMONYMS = {
    *("All", "Card", "Compiler", "Device", "Documents", "Entry", "Group", "Names", "Order", "Part", "Progress"),
    *("Request", "Room", "Run", "Span", "State", "StoredTensor", "Tokens", "Unit", "Uses", "Verdict"),
}
PARTS = "python/roundpipe/checkpoints/saving/parts.py"
# Files of both languages whose messages share a phrase, and why.
PHRASES = {
    "whether an optimizer steps the model is asked of Python's optimizers in Python": (
        ("roundpipe/runs/model_parts.cpp", PARTS),
        ("roundpipe/runs/save_checkpoint.cpp", PARTS),
        ("roundpipe/api/model.cpp", PARTS),
    ),
    "advice in the words of the language": (
        ("roundpipe/api/host_weights.cpp", "python/roundpipe/model/step/fused_steps.py"),
        ("roundpipe/api/model.cpp", "python/roundpipe/model/step/fused_steps.py"),
        ("roundpipe/api/host_weights.cpp", "python/roundpipe/model/step/torch_steps.py"),
        ("roundpipe/api/host_weights.cpp", "python/roundpipe/optim/for_model.py"),
        ("roundpipe/runs/model_parts.cpp", "python/roundpipe/model/step/fused_steps.py"),
        ("roundpipe/runs/save_checkpoint.cpp", "python/roundpipe/model/step/fused_steps.py"),
        ("roundpipe/runs/load_checkpoint.cpp", "python/roundpipe/model/step/fused_steps.py"),
        ("roundpipe/training/copy_steps.cpp", "python/roundpipe/model/step/group.py"),
        ("roundpipe/api/model.cpp", "python/roundpipe/model/step/group.py"),
        ("roundpipe/memory/parameter_block.cpp", "python/roundpipe/following/layers/shell.py"),
        ("roundpipe/api/loss.cpp", "python/roundpipe/model/call/loss_function.py"),
        ("roundpipe/core/skipped_steps.cpp", "python/roundpipe/ops/packed_attention.py"),
    ),
    "help of a command for what only one of the two has": (
        ("roundpipe/command/training_options.cpp", "python/roundpipe/train/config.py"),
        ("programs/train/options.cpp", "python/roundpipe/train/command.py"),
        ("programs/train/options.cpp", "python/roundpipe/train/demo/command.py"),
    ),
    "a few words that fit many things": (
        ("roundpipe/api/model.cpp", "python/roundpipe/plan/costs.py"),
        ("roundpipe/api/optimizer.cpp", "python/roundpipe/optim/lion.py"),
        ("roundpipe/schedule/costs.cpp", "python/roundpipe/optim/lion.py"),
    ),
}
MOST_REASONS = 10

Texts = list[tuple[str, str]]  # file, message


def sources(folders: tuple[str, ...], *suffixes: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                yield str(path.relative_to(ROOT)), path.read_text()


def cpp_sources() -> Iterator[tuple[str, str]]:
    return sources(("roundpipe", "programs"), ".h", ".cpp")


def cpp_classes() -> set[str]:
    head = re.compile(r"(?m)^\s*(?:class|struct)(?: ROUNDPIPE_API)? (\w+)(?: final)?(?: :[^;{]*)? \{")
    return {name for _, text in cpp_sources() for name in head.findall(text)}


def python_trees() -> Iterator[tuple[str, ast.AST]]:
    return ((name, ast.parse(text)) for name, text in sources(("python/roundpipe",), ".py"))


def python_classes() -> set[str]:
    return {node.name for _, tree in python_trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def cpp_texts() -> Texts:
    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')
    return [
        (name, " ".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found)))
        for name, text in cpp_sources()
        for found in literal.findall(re.sub(r"(?m)//.*$", "", text))
    ]


def python_texts() -> Texts:
    texts: Texts = []
    for name, tree in python_trees():
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                texts.append((name, node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else " " for part in node.values)
                texts.append((name, " ".join(map(str, parts))))
    return texts


def phrases(texts: Texts) -> dict[str, set[str]]:
    """The files of each phrase of so many words."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in texts:
        words = re.findall(r"[a-z']+", text.lower())
        for first in range(len(words) - PHRASE_WORDS + 1):
            found[" ".join(words[first : first + PHRASE_WORDS])].add(name)
    return found


def test_classes_of_both_languages() -> None:
    listed = {name for names in FACES.values() for name in names}
    assert not listed & HOMONYMS
    both = cpp_classes() & python_classes()
    assert both - listed - HOMONYMS == set(), "in both languages, and no reason is given"
    assert (listed | HOMONYMS) - both == set(), "no longer in both languages: take it from the list"


def test_phrases_of_both_languages() -> None:
    of_cpp, of_python = phrases(cpp_texts()), phrases(python_texts())
    both: dict[tuple[str, str], str] = {}
    for phrase in of_cpp.keys() & of_python.keys():
        for cpp in of_cpp[phrase]:
            for python in of_python[phrase]:
                both[cpp, python] = phrase
    listed = {pair for pairs in PHRASES.values() for pair in pairs}
    assert {pair: both[pair] for pair in both.keys() - listed} == {}, "in both languages, and no reason is given"
    assert listed - both.keys() == set(), "no longer in both languages: take it from the list"


def test_the_reasons_are_few() -> None:
    assert len(FACES) <= MOST_REASONS and len(PHRASES) <= MOST_REASONS
