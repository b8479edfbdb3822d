"""Clang's thread safety analysis over the engine's sources, as they are compiled in a build folder.

    tools/thread_safety.py build/release

Locks are annotated with core/mutex.h. Where there is no clang++, this says so and checks nothing.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What GCC alone knows.
GCC_ONLY = re.compile(r"-Winvalid-pch|-fno-math-errno|-fno-trapping-math|-Wno-error=.*|-include|.*cmake_pch\.hxx")


def check(entry: dict[str, str], clang: str) -> str:
    """What clang says of one source; empty where all is well."""
    arguments = [argument for argument in shlex.split(entry["command"])[1:] if not GCC_ONLY.fullmatch(argument)]
    arguments[arguments.index("-o") : arguments.index("-o") + 2] = []
    wanted = ["-fsyntax-only", "-O0", "-w", "-Wthread-safety", "-Werror=thread-safety"]
    done = subprocess.run([clang, *arguments, *wanted], cwd=entry["directory"], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def main() -> None:
    build = Path(sys.argv[1])
    clang = shutil.which("clang++")
    if clang is None:
        print("note: no clang++ here, so locks are not checked")
        return
    entries = json.loads((build / "compile_commands.json").read_text())
    ours = f"{Path.cwd()}/roundpipe/", f"{build.resolve()}/roundpipe/"
    wanted = [entry for entry in entries if entry["file"].startswith(ours) and "cmake_pch" not in entry["file"]]
    if not wanted:
        raise SystemExit(f"[thread_safety] {build} has none of our sources; run `make build` first")
    with ThreadPoolExecutor() as pool:
        wrong = [text for text in pool.map(lambda entry: check(entry, clang), wanted) if text]
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"locks: {len(wanted)} sources checked")


if __name__ == "__main__":
    main()
