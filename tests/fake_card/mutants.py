"""Plants mistakes into the engine, one at a time, and tells which of them the tests on the test card find.

`make test-mutants` runs it; docs/extending.md has the table. Each mistake is one change of text in a copy of the
sources, built in a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SEEDS = (0, 1, 2)  # of delays, one after the other until a test fails


# Of an interpreter whose package is installed in place: its finder would come before the path.
FROM_THE_PATH = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable_skbc")]
"""


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` becomes `new` in `file`, and `tests` are to find it.

    Attributes:
        survives: why the tests do not find it, where they do not.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""


LATE = ("tests/fake_card/test_engine_on_card.py", "-k", "late")
FAULTS = ("tests/fake_card/test_engine_on_card.py", "-k", "lost")
RANDOM = ("tests/gpu/test_random_state.py", "-k", "documented and card")

MUTANTS = (
    Mutant(
        "no record_stream in staging",
        "roundpipe/runtime/worker/staging.cpp",
        "  device_.compute().uses(uploaded);\n",
        "",
        LATE,
    ),
    Mutant(
        "an outbox that does not wait for compute",
        "roundpipe/runtime/worker/outbox.cpp",
        "transfer::Transfer transfer{priority, {computed, room},",
        "transfer::Transfer transfer{priority, {room},",
        LATE,
    ),
    Mutant(
        "an event that fires at once",
        "roundpipe/device/accelerator/accelerator_device.cpp",
        "      completion_.watch(event);\n",
        "      event->fire();\n",
        LATE,
    ),
    Mutant(
        "pieces dropped early",
        "roundpipe/transfer/link_scheduler.cpp",
        "    chunk->last = issue_chunk(*entry, *chunk);\n",
        "    chunk->last = issue_chunk(*entry, *chunk);\n    if (chunk->last) entry->pieces.clear();\n",
        LATE,
    ),
    Mutant(
        "computed not awaited in DeviceRoom::release",
        "roundpipe/runtime/worker/device_room.cpp",
        "  pending.push_back(computed);\n",
        "",
        LATE,
        survives="what a job sends last waits for its last kernels, and release() waits for what it sends",
    ),
    Mutant(
        "a job that does not wait for its weights",
        "roundpipe/runtime/worker/layer_runner.cpp",
        "    uploaded->wait_complete();\n  }\n  uploaded->wait();\n",
        "  }\n",
        LATE,
        survives="inputs are awaited next, and small weights are there by then",
    ),
    Mutant(
        "no record_stream of earlier gradients",
        "roundpipe/runtime/worker/gradient_sums.cpp",
        "    device_.compute().uses(*uploaded);\n",
        "",
        LATE,
    ),
    Mutant(
        "generators of cards not seeded in a backward",
        "roundpipe/torch_compat/own_generators.cpp",
        "  shared_.set_current_seed(seed);\n",
        "",
        RANDOM,
    ),
    Mutant(
        "a slot let go of by asking the device",
        "roundpipe/runtime/worker/layer_runner.cpp",
        "tensor.set_data(nothing_.at(tensor.scalar_type()));",
        "tensor.set_data(at::empty({0}, tensor.options()));",
        FAULTS,
    ),
)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]


class Copy:
    """The sources in `build`/source, built in `build`/build."""

    def __init__(self, build: Path, card: Path) -> None:
        self.source, self.objects, self.card = build / "source", build / "build", card

    def refresh(self) -> None:
        names = run(["git", "ls-files", "-z"], cwd=ROOT).stdout.split("\0")
        for name in filter(None, names):
            theirs, mine = ROOT / name, self.source / name
            if theirs.is_file() and not (mine.is_file() and mine.read_bytes() == theirs.read_bytes()):
                mine.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(theirs, mine)
        (self.source / "python/sitecustomize.py").write_text(FROM_THE_PATH)
        if not (self.objects / "build.ninja").exists():
            options = [
                *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DROUNDPIPE_UNITY=OFF"),
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.source / 'python/roundpipe'}",
            ]
            made = run([str(BIN / "cmake"), "-S", str(self.source), "-B", str(self.objects), *options])
            if made.returncode != 0:
                sys.exit(made.stderr)

    def build(self) -> None:
        done = run([str(BIN / "ninja"), "-C", str(self.objects), "--quiet", "_core"])
        if done.returncode != 0:
            sys.exit(f"it does not compile:\n{done.stdout[-4000:]}")

    def check_imports(self) -> None:
        found = run([sys.executable, "-c", "import roundpipe._core as c; print(c.__file__)"], env=self.environment(0))
        if not found.stdout.startswith(str(self.source)):
            sys.exit(f"the package comes from {found.stdout}{found.stderr}, expected {self.source}")

    def environment(self, seed: int) -> dict[str, str]:
        path = os.pathsep.join([str(self.source / "python"), str(self.card)])
        return os.environ | {
            "PYTHONPATH": path,
            # The card links the engine's library, and each process has one: this copy's.
            "LD_LIBRARY_PATH": str(self.source / "python/roundpipe"),
            "ROUNDPIPE_REQUIRE_GPU": "1",
            "OMP_NUM_THREADS": "1",
            "CARD_DELAYS": str(seed),
        }

    def first_failure(self, tests: tuple[str, ...], seed: int) -> str | None:
        """What the tests say of the first that fails; None when all pass."""
        options = ["-x", "-q", "--timeout=120", "-p", "no:cacheprovider", "--tb=line"]
        done = run([sys.executable, "-m", "pytest", *options, *tests], cwd=self.source, env=self.environment(seed))
        if done.returncode == 0:
            return None
        if done.returncode not in (1, -6, -11, 134, 139):
            sys.exit(f"the tests could not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"the process ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/mutants")
    parser.add_argument("--card", type=Path, default=ROOT / "build/release/tests/fake_card")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    copy = Copy(options.build.resolve(), options.card.resolve())
    copy.refresh()
    copy.build()
    copy.check_imports()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    for tests in dict.fromkeys(mutant.tests for mutant in chosen):
        if failure := copy.first_failure(tests, SEEDS[1]):
            sys.exit(f"without a mistake: {failure}")
    survivors = 0
    for mutant in chosen:
        file = copy.source / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} places for it, expected one")
        file.write_text(text.replace(mutant.old, mutant.new))
        try:
            copy.build()
            found = next(((seed, at) for seed in SEEDS if (at := copy.first_failure(mutant.tests, seed))), None)
        finally:
            file.write_text(text)
        survivors += found is None and not mutant.survives
        missed = f"not found: {mutant.survives}" if mutant.survives else "NOT FOUND"
        print(f"{mutant.name}: {f'{found[1]} (delays {found[0]})' if found else missed}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
