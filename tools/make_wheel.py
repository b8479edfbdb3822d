"""Builds a source distribution, and from it a wheel for this Python and this torch, with their hashes.

A compiled extension of torch fits one minor version of torch only, which a wheel's file name cannot say. So the version
gets a local part, `+torch2.13`, and the wheel asks for exactly the torch that it was built with.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent


def run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


def pin_torch(unpacked: Path, torch: str) -> None:
    """Rewrites the metadata of an unpacked wheel: its version, and what it asks of torch."""
    (old,) = unpacked.glob("*.dist-info")
    version = f"{old.name.removesuffix('.dist-info').split('-')[1]}+torch{'.'.join(torch.split('.')[:2])}"
    text = (old / "METADATA").read_text(encoding="utf-8")
    text, versions = re.subn(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
    text, pins = re.subn(r"(?m)^Requires-Dist: torch[<>=!~ ].*$", f"Requires-Dist: torch=={torch}", text)
    if (versions, pins) != (1, 1):
        raise SystemExit(
            f"error: [wheel] {old.name}/METADATA has {versions} versions and {pins} torch, expected 1 and 1"
        )
    (old / "METADATA").write_text(text, encoding="utf-8")
    old.rename(old.with_name(f"{old.name.split('-')[0]}-{version}.dist-info"))


def write_hashes(out: Path) -> None:
    """`SHA256SUMS` for `sha256sum --check`, of every distribution in the folder."""
    files = sorted(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the files")
    out: Path = parser.parse_args().out
    # A version's local part names a kind of build (+cpu, +cu130); what the extension needs is the same in all of them.
    torch = metadata.version("torch").split("+")[0]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built, unpacked = Path(folder, "built"), Path(folder, "unpacked")
        print("wheel: a source distribution, and from it a wheel. About 10 minutes on two cores", flush=True)
        run("build", "--no-isolation", "--outdir", str(built), str(SOURCE))
        (wheel,) = built.glob("*.whl")
        run("wheel", "unpack", "--dest", str(unpacked), str(wheel))
        (tree,) = unpacked.iterdir()
        pin_torch(tree, torch)
        wheel.unlink()
        run("wheel", "pack", "--dest-dir", str(built), str(tree))
        made = sorted(built.iterdir())
        for file in made:
            shutil.move(file, out / file.name)
    write_hashes(out)
    for name in [*(file.name for file in made), "SHA256SUMS"]:
        print(f"wheel: {out / name}")


if __name__ == "__main__":
    main()
