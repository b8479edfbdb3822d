"""Ways in which a checkpoint is damaged: by a disk, by what people do to files, and by who writes what nobody saved."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe import _core

MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Damage:
    """A way to damage one file of a checkpoint.

    Attributes:
        name: of the way, with its file.
        file: that is damaged.
        do: damages it, in the checkpoint's folder.
        signed: the manifest says that the file is right, so only its contents show that something is wrong, if anything
            does.
    """

    name: str
    file: str
    do: Callable[[Path], None]
    signed: bool = False


# -- what a disk and people do ----------------------------------------------------------------------------------------


def of_bytes(file: str, content: bytes, rng: random.Random, flips: int) -> Iterator[Damage]:
    """Flipped bits, cuts, and other bytes of a file."""

    def changed(what: str, change: Callable[[bytearray], None]) -> Damage:
        def do(folder: Path) -> None:
            data = bytearray((folder / file).read_bytes())
            change(data)
            (folder / file).write_bytes(data)

        return Damage(f"{what} of {file}", file, do)

    def flip(data: bytearray, at: int, bit: int) -> None:
        data[at] ^= 1 << bit

    def middle_zeros(data: bytearray) -> None:
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)

    def halves(data: bytearray) -> None:
        half = len(data) // 2
        data[:] = data[half:] + data[:half]

    places = [0, 7, 8, len(content) - 1, *(rng.randrange(len(content)) for _ in range(flips))]
    for at in sorted({place for place in places if place < len(content)}):
        bit = rng.randrange(8)
        yield changed(f"bit {bit} of byte {at}", lambda data, at=at, bit=bit: flip(data, at, bit))  # type: ignore[misc]
    for left in sorted({0, 1, 7, 8, len(content) // 2, len(content) - 1}):
        if left < len(content):
            yield changed(f"the first {left} bytes", lambda data, left=left: data.__delitem__(slice(left, None)))  # type: ignore[misc]
    yield changed("a byte more", lambda data: data.append(0))
    if len(content) > 8:
        yield changed("zeros in the middle", middle_zeros)
        yield changed("exchanged halves", halves)


def of_places(file: str, before: Path | None) -> Iterator[Damage]:
    """Something else in the place of a file; `before`: the same file of the step before, if it differs."""

    def placed(what: str, place: Callable[[Path], None]) -> Damage:
        def do(folder: Path) -> None:
            path = folder / file
            path.rename(folder.parent / "aside")
            place(path)

        return Damage(f"{what} for {file}", file, do)

    def sparse(path: Path) -> None:
        with path.open("wb") as made:
            made.truncate(1 << 40)

    yield placed("nothing", lambda path: None)
    yield placed("a folder", lambda path: path.mkdir())
    yield placed("a link to it", lambda path: path.symlink_to("../aside"))
    yield placed("a link to nothing", lambda path: path.symlink_to("nothing"))
    yield placed("a pipe", lambda path: os.mkfifo(path))
    yield placed("a terabyte of nothing", sparse)
    yield placed("an empty file", lambda path: path.touch())
    if before is not None:
        old = before.read_bytes()

        def old_one(folder: Path) -> None:
            (folder / file).write_bytes(old)

        yield Damage(f"the file of the step before for {file}", file, old_one)
    if os.getuid() != 0:
        yield Damage(f"no right to read {file}", file, lambda folder: (folder / file).chmod(0))


# -- what nobody saved, with a manifest that says it is right ---------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
ODD: list[Any] = [None, True, -1, 0, 1.5, 1e308, 2**31, 2**63 - 1, 2**63, 2**64, 10**40, "", "x", "\0", [], {}, [[]]]
ODD += [{"dict": 1}, {"dict": [[1]]}, {"tensor": "none"}, {"array": "none"}, {"tuple": 0}, {"bytes": "="}, {"what": 1}]
ODD += [{"dict": [], "array": 1}, {"int": "9" * 9999}, {"float": "1"}, {"tensor": 1}]


def sign(folder: Path, **fields: Any) -> None:
    """Writes a manifest for the files that are there; `fields` replace its own."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("manifest_crc32c")
    for record in manifest["files"]:
        content = (folder / record["name"]).read_bytes()
        record.update(bytes=len(content), crc32c=f"{_core.crc32c(content):08x}")
    write_manifest(folder, manifest | fields)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest of these fields with its checksum at the end."""
    text = json.dumps(manifest, indent=2)[:-2]
    checksum = _core.crc32c(text.encode())
    (folder / MANIFEST).write_text(f'{text},\n  "manifest_crc32c": "{checksum:08x}"\n}}\n')


def paths_in(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value in a JSON value is."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*before, key)
        yield from paths_in(child, (*before, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy of a JSON value with another value at `path`; `by` = ...: with none."""
    made = copy.deepcopy(value)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    if by is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = by
    return made


def of_states(text: str, rng: random.Random, count: int) -> Iterator[Damage]:
    """Other JSON in the place of the state, or of values in it."""

    def written(what: str, content: str) -> Damage:
        def do(folder: Path) -> None:
            (folder / STATE).write_text(content)
            sign(folder)

        return Damage(f"{what} in {STATE}", STATE, do, signed=True)

    for content in ("", "[]", "{}", "null", "0", '"x"', "{", "[" * 200_000, DEEP, '{"a": ' * 500 + "1" + "}" * 500):
        yield written(f"{content[:20]!r} ({len(content)} letters)", content)
    state = json.loads(text)
    every = list(paths_in(state))
    top = [path for path in every if len(path) <= 3]
    for index in range(count):
        path = rng.choice(top if index % 2 else every)
        by = rng.choice([*ODD, ..., ...])
        what = "nothing" if by is ... else f"{str(by)[:20]!r}"
        yield written(f"{what} at {'.'.join(map(str, path))[:60]}", json.dumps(replaced(state, path, by)))
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    yield written("300 lists", json.dumps(replaced(state, ("state", "note"), {"value": nested})))
    yield written("a name twice", text.replace('"step"', '"steps"', 1))


def of_manifests(rng: random.Random, count: int) -> Iterator[Damage]:
    """Other fields of a manifest whose checksum is right."""

    def written(what: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
        def do(folder: Path) -> None:
            manifest = json.loads((folder / MANIFEST).read_text())
            manifest.pop("manifest_crc32c")
            write_manifest(folder, change(manifest) or manifest)

        return Damage(f"{what} in {MANIFEST}", MANIFEST, do, signed=True)

    for nodes in (0, 1, 2, 5, 2_000_000, 2**40, 2**63 - 1, 10**30, -1, "2", None):
        yield written(f"nodes {nodes}", lambda own, nodes=nodes: own | {"version": "2.0", "nodes": nodes})  # type: ignore[misc]
    for step in (0, 1, 2**40, -1, 10**30, "2", None):
        yield written(f"step {step}", lambda own, step=step: own | {"step": step})  # type: ignore[misc]
    for version in ("1.9", "3.0", "0.1", "x", "", None, 1):
        yield written(f"version {version}", lambda own, version=version: own | {"version": version})  # type: ignore[misc]
    yield written("no files", lambda own: own | {"files": []})
    yield written("files twice", lambda own: own | {"files": own["files"] * 2})
    for _ in range(count):
        by = rng.choice([*ODD, ...])
        seed = rng.randrange(1 << 30)

        def change(own: dict[str, Any], by: Any = by, seed: int = seed) -> Any:
            return replaced(own, random.Random(seed).choice(list(paths_in(own))), by)

        yield written(f"{str(by)[:20]!r} somewhere ({seed})", change)


def of_headers(file: str, content: bytes, rng: random.Random, count: int) -> Iterator[Damage]:
    """Other headers of a file with tensors."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def written(what: str, text: str, stated: int | None = None, rest: bytes = data) -> Damage:
        def do(folder: Path) -> None:
            raw = text.encode()
            (folder / file).write_bytes(struct.pack("<Q", len(raw) if stated is None else stated) + raw + rest)
            sign(folder)

        return Damage(f"{what} in the header of {file}", file, do, signed=True)

    own = json.dumps(header)
    for stated in (0, 1, len(own) + 1, 2**31, 2**40, 2**63, 2**64 - 1):
        yield written(f"a length of {stated}", own, stated)
    for text in ("", "{}", "[]", "null", DEEP, "{" * 1000):
        yield written(f"{text[:20]!r} ({len(text)} letters)", text)
    names = [name for name in header if name != "__metadata__"]
    if names:
        name = rng.choice(names)
        other = dict(header)
        other["renamed"] = other.pop(name)
        yield written(f"another name for {name}", json.dumps(other))
        for shape in ([], [0], [2**62, 0], [2**62, 4], [1] * 100_000, [-1], ["a"], None):
            yield written(f"the shape {str(shape)[:20]}", json.dumps(replaced(header, (name, "shape"), shape)))
    every = list(paths_in(header))
    for _ in range(count):
        path, by = rng.choice(every), rng.choice([*ODD, ...])
        yield written(f"{str(by)[:20]!r} at {'.'.join(map(str, path))[:60]}", json.dumps(replaced(header, path, by)))


def damages(folder: Path, seed: int, many: int) -> list[Damage]:
    """Ways to damage each file of a checkpoint.

    Args:
        folder: the checkpoint, as it was saved.
        seed: of what is chosen at random.
        many: how many flipped bits and odd values of each file.
    """
    rng = random.Random(seed)
    found: list[Damage] = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        found += of_bytes(path.name, content, rng, many)
        before = folder.parent / "step-1" / path.name
        found += of_places(path.name, before if before.exists() and before.read_bytes() != content else None)
        if path.suffix == ".safetensors":
            found += of_headers(path.name, content, rng, many)
    found += of_states((folder / STATE).read_text(), rng, 4 * many)
    found += of_manifests(rng, many)
    return found


def damaged_copy(run: Path, into: Path, damage: Damage, step: int = 2) -> Path:
    """A copy of a run whose checkpoint `step` is damaged."""
    shutil.copytree(run, into)
    damage.do(into / f"step-{step}")
    return into
