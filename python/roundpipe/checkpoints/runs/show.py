"""What a run's folder holds, in words, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from roundpipe import _core
from roundpipe.checkpoints.saving.stored import StoredCheckpoint


def describe(folder: Path) -> Iterator[str]:
    """Yields lines about a run's folder or a checkpoint.

    Raises:
        ValueError: there is neither.
    """
    paths = _existing(folder)
    if paths != [folder]:
        for found in _core.find_steps(str(folder)):
            size = sum(file.bytes for file in _core.read_manifest(found.folder).files) if not found.problem else 0
            yield f"step-{found.step}: " + (found.problem or f"complete, {_core.format_bytes(size)}")
    yield ""
    stored = StoredCheckpoint(paths[0])
    state = stored.state
    yield f"{paths[0]}"
    yield f"  step {stored.manifest.step}, after {state['steps']} steps of the optimizer"
    yield "  written by " + ", ".join(f"{name} {version}" for name, version in stored.manifest.writer.items())
    if stored.nodes > 1:
        yield f"  of {stored.nodes} nodes, each with its part of the optimizer's state"
    optimizer = state.get("optimizer")
    if optimizer is not None:
        yield f"  optimizer {optimizer['class']}, moments {optimizer['moments']}"
    for section, tensors in stored.tensors.items():
        size = sum(entry.bytes for entry in tensors.values())
        yield f"  {section}: {len(tensors)} tensors, {_core.format_bytes(size)}"
    for rank, own in enumerate(stored.ranks if stored.nodes > 1 else []):
        sizes = {section: sum(entry.bytes for entry in tensors.values()) for section, tensors in own.tensors.items()}
        yield f"  rank {rank}: " + ", ".join(f"{name} {_core.format_bytes(size)}" for name, size in sizes.items())
    own_values = stored.ranks[0].values
    if state["outside"]:
        yield f"  {len(state['outside'])} frozen parameters are left out: those of the base"
    if own_values["state"]:
        yield "  state: " + ", ".join(own_values["state"])
    for path, pipe in own_values["pipelines"].items():
        number = pipe["num_microbatch"]
        yield f"  {path or 'model'}: {pipe['calls']} calls, num_microbatch {'open' if number is None else number}"
    if paths != [folder]:
        journal = _core.read_journal(str(folder))
        if journal.records:
            last = journal.records[-1]
            yield f"  journal: {len(journal.records)} steps, the last is {last.step}"


def problems_of(folder: Path, tell: Callable[[str], None]) -> Iterator[tuple[Path, list[_core.FileProblem]]]:
    """Verifies a checkpoint, or all of a run's; yields the problems of each."""
    for path in _existing(folder):
        tell(f"reading {path}")
        yield path, _core.verify_step(str(path))


def _existing(folder: Path) -> list[Path]:
    paths = [Path(path) for path in _core.checkpoints_in(str(folder))]
    if not paths:
        found = [f"step-{step.step} ({step.problem})" for step in _core.find_steps(str(folder))]
        raise ValueError(
            f"[checkpoint] {folder} has no complete checkpoint, expected a run's folder or step-N"
            + (f"; incomplete: {', '.join(found)}" if found else "")
        )
    return paths
