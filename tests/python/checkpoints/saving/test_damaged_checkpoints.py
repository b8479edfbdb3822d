"""The enemy: every file of a checkpoint is damaged in many ways, and loaded in both languages.

The step before is loaded, with its own losses and a line that names what was wrong; or, where there is none, one clear
error comes. Never other numbers, another exception, or much memory.
"""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from cpp_twin import FUSED, PROGRAM, TORCH, Training, same_form, tried_in_cpp
from damaging import MANIFEST, Damage, damaged_copy, damages
from roundpipe import RoundPipeError
from sweeps import mostly_long

MOST_KILOBYTES = 200_000
KINDS = [(FUSED, torch.float32), (FUSED, torch.bfloat16), (TORCH, torch.float32)]


@dataclass
class Enemy:
    """A run of two checkpoints, and what a training that loads it says.

    Attributes:
        run: the run's folder.
        training: loads all of it, one after the other; another one after damage that nobody can tell.
        losses: of the two steps after each checkpoint.
    """

    run: Path
    training: Training
    losses: dict[int, list[str]]

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads and goes on, as the program in C++ does with `try`."""
        result: dict[str, Any] = {}
        try:
            result["step"] = self.training.load(folder).step
            result["losses"] = self.training.steps(2)
        except ValueError as error:
            result["mistake"] = str(error)
        except RoundPipeError as error:
            result["error"] = str(error)
        except Exception as error:
            result["unexpected"] = f"{type(error).__name__}: {error}"
        if result.get("step") == 2:  # an optimizer or scheduler may have taken what would not be taken back
            self.training = Training(self.training.kind, self.training.dtype)
        return result


@pytest.fixture(
    params=mostly_long(KINDS, KINDS[1]),
    ids=lambda kind: f"{kind[0]}-{str(kind[1]).removeprefix('torch.')}",
    scope="module",
)
def enemy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Enemy:
    kind, dtype = request.param
    roundpipe.devices("virtual:2")
    run = tmp_path_factory.mktemp("enemy") / "run"
    training = Training(kind, dtype)
    losses: dict[int, list[str]] = {}
    for step in (1, 2):
        training.steps(1)
        if kind == FUSED and step == 2:
            training.calls(1)  # gradients that no step has consumed
        training.save(run)
    for step in (1, 2):
        training.load(run / f"step-{step}")
        losses[step] = training.steps(2)
    assert losses[1] != losses[2]
    return Enemy(run, training, losses)


def names(damage: Damage, text: str) -> bool:
    """Whether a message names the file; beside a manifest of another step, it is the others that are not right."""
    return damage.file in text or (damage.file == MANIFEST and "step-2" in text)


def wrong(damage: Damage, result: dict[str, Any], told: str, losses: dict[int, list[str]]) -> str | None:
    """What is wrong with a result; None if nothing is."""
    if "step" not in result:
        text = result.get("error", result.get("mistake", ""))
        # A value that was changed together with its checksum may belong to another training.
        return None if damage.signed and text.startswith("[") else f"refused: {text}{result.get('unexpected', '')}"
    if "losses" not in result:
        # Such a value may also be one that torch's own optimizer does not step with.
        return None if damage.signed and result["step"] == 2 else f"the next step failed: {result}"
    if result["step"] == 1:
        if [same_form(loss) for loss in result["losses"]] != losses[1]:
            return f"other numbers than those of step 1: {result['losses']}"
        if "going back from step 2 to step 1, which loses 1 step: " not in told:
            return f"nothing was told: {told!r}"
        return None if damage.signed or names(damage, told) else f"no file is named: {told!r}"
    # Nobody can tell a number that was changed together with its checksum from one that was saved.
    return None if damage.signed else "the damaged checkpoint was loaded"


def check(enemy: Enemy, found: list[Damage], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, before = enemy.training, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folders = [damaged_copy(enemy.run, tmp_path / str(number), damage) for number, damage in enumerate(found)]
    problems = []
    for damage, folder in zip(found, folders, strict=True):
        capsys.readouterr()
        result = enemy.load(folder)
        if problem := wrong(damage, result, capsys.readouterr().err, enemy.losses):
            problems.append(f"Python, {damage.name}: {problem}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > MOST_KILOBYTES:
        problems.append(f"Python took {grown} kilobytes more")
    if PROGRAM.exists():
        results = tried_in_cpp(folders, training.kind, training.dtype)
        for damage, result in zip(found, results, strict=True):
            if problem := wrong(damage, result, " ".join(result["told"]), enemy.losses):
                problems.append(f"C++, {damage.name}: {problem}")
        grown = results[-1]["peak_kilobytes"] - results[0]["peak_kilobytes"]
        if grown > MOST_KILOBYTES:
            problems.append(f"C++ took {grown} kilobytes more")
    for folder in folders:
        shutil.rmtree(folder)
    assert not problems, "\n".join(problems)


def test_damage_of_any_file_leads_to_the_step_before(
    enemy: Enemy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A third, which still has some of each file and each way; the rest is among those of the long test.
    check(enemy, damages(enemy.run / "step-2", seed=0, many=1)[::3], tmp_path, capsys)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_much_more_damage(enemy: Enemy, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = damages(enemy.run / "step-2", seed, many=20)
    for first in range(0, len(found), 500):
        check(enemy, found[first : first + 500], tmp_path, capsys)


def test_without_another_checkpoint_one_error_names_the_file(enemy: Enemy, tmp_path: Path) -> None:
    few = [damage for damage in damages(enemy.run / "step-2", seed=1, many=1) if not damage.signed]
    folders = [damaged_copy(enemy.run, tmp_path / str(number), damage) / "step-2" for number, damage in enumerate(few)]
    results = [("Python", [enemy.load(folder) for folder in folders])]
    if PROGRAM.exists():
        results.append(("C++", tried_in_cpp(folders, enemy.training.kind, enemy.training.dtype)))
    for language, of_language in results:
        for damage, result in zip(few, of_language, strict=True):
            text = result.get("error", "")
            assert "has no checkpoint that is whole" in text, (language, damage.name, result)
            assert names(damage, text), (language, damage.name, result)
