"""Compiles what others compile when they are first used, before anything is timed.

    python bench/support/prepare_peers.py [--peer DIR]

What is built stays in build/torch_extensions, where the processes of bench/gpu/kit.py look. Who is not installed is
left out, and who fails is named; the kit then says the same of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.compiled import EXTENSIONS, environment, remove_stale_locks

PROGRAMS = {
    "deepspeed": "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()",
    "trainstream": "import trainstream",
    # Of the published package: ours has no such module.
    "roundpipe.optim.optim_builder": "from roundpipe.optim.optim_builder import load_optim_function as f; f('adam')",
}
LIMIT_S = 150


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peer", type=Path, help="folder of others' packages")
    options = arguments.parse_args()
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    remove_stale_locks()
    path = [*([str(options.peer.resolve())] if options.peer else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    setting = environment() | {"PYTHONPATH": os.pathsep.join([*path, str(Path(__file__).parents[1])])}
    first = "from support.trainers import only_the_path; only_the_path(); "
    found = [name for name in PROGRAMS if _is_there(name, [*path, *sys.path])]
    start = time.monotonic()
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", first + PROGRAMS[name]], env=setting, stdout=subprocess.DEVNULL, stderr=-1
        )
        for name in found
    }
    for name, process in running.items():
        try:
            _, stderr = process.communicate(timeout=max(1, LIMIT_S - time.monotonic() + start))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            print(f"prepare: {name}: not compiled within {LIMIT_S} s")
            continue
        said = stderr.decode().strip().splitlines() or [""]
        print(f"prepare: {name}: {f'failed: {said[-1]}' if process.returncode else 'ready'}", flush=True)


def _is_there(name: str, folders: list[str]) -> bool:
    where = Path(*name.split("."))
    return any(
        (Path(folder) / where).exists() or (Path(folder) / where).with_suffix(".py").exists() for folder in folders
    )


if __name__ == "__main__":
    main()
