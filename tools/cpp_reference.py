"""Writes docs/reference/cpp.md: what programs in C++ use, from the headers themselves.

python tools/cpp_reference.py

The page has the declarations of the headers that are installed, those that `roundpipe/roundpipe.h` includes, with their
comments; what is private, of the engine's, or a definition is left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "cpp.md"
HEAD = """# Reference of the C++ headers

`roundpipe/roundpipe.h` includes all of these. [cpp.md](../cpp.md) shows how they are used. This page is made from the
headers by `tools/cpp_reference.py`.
"""
INCLUDE = re.compile(r"#include <(roundpipe/[^>]+)>")
# A namespace that only declares names of the engine's.
FORWARD = re.compile(r"^namespace [\w:]+ \{\n(?:(?:class|struct) \w+;\n)+\}.*\n", re.M)


def headers() -> list[str]:
    """The headers of the page, those that another one needs before it."""
    found: list[str] = []

    def visit(header: str) -> None:
        for included in INCLUDE.findall((ROOT / header).read_text()):
            if included not in found:
                visit(included)
        found.append(header)

    visit("roundpipe/roundpipe.h")
    return found[:-1]


def without_blocks(lines: list[str]) -> Iterator[str]:
    """Leaves out includes, `detail`, private parts, and the parts of classes that are marked for others."""
    end: re.Pattern[str] | None = None  # of what is left out
    for line in lines:
        if end is not None:
            if not end.match(line):
                continue
            kept_end = line.rstrip().endswith("};")
            end = None
            if kept_end:
                yield line
            continue
        hidden = re.match(r"( *) (?:private|protected):$", line)
        marked = re.match(r"( *)  // -- for ", line)
        if hidden or marked:
            end = re.compile(rf"{(hidden or marked)[1]}}};")  # type: ignore[index]
        elif line.startswith("namespace detail {"):
            end = re.compile(r"}  // namespace detail")
        elif re.match(r"// -- for ", line):
            end = re.compile(r"}  // namespace ")
        elif not re.match(r"#pragma|#include", line):
            yield line


def without_definitions(lines: list[str]) -> Iterator[str]:
    """Replaces the bodies of functions by semicolons."""
    body: str | None = None  # the indentation of the function whose body is left out
    for line in lines:
        if body is not None:
            if line.startswith(f"{body}}}"):
                body = None
            continue
        one = re.match(r"( *[^/ ].*\).*?) \{.*\}$", line)
        begin = re.match(r"( *)(.*\)(?: const| noexcept| override)*) \{$", line)
        if one and not line.lstrip().startswith(("struct", "class", "enum", "//")):
            yield _without_initialisers(one[1]) + ";"
        elif begin and not begin[2].lstrip().startswith(("struct", "class", "//")):
            body = begin[1]
            yield f"{begin[1]}{_without_initialisers(begin[2])};"
        else:
            yield line


def _without_initialisers(declaration: str) -> str:
    return re.sub(r"\) : .*", ")", declaration)


def section(header: str) -> str:
    lines = FORWARD.sub("", (ROOT / header).read_text()).splitlines()
    text = "\n".join(without_definitions(list(without_blocks(lines))))
    spaces = re.findall(r"(?m)^namespace ([\w:]+) \{$", text)
    if len(spaces) == 1:
        text = re.sub(r"(?m)^(namespace .*|\}  // namespace .*)$", "", text)
    text = text.strip("\n")
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=\n *};)", "", text)
    text = text.replace("ROUNDPIPE_API ", "")
    named = f"Namespace `{spaces[0]}`.\n\n" if len(spaces) == 1 else ""
    return f"## `{header}`\n\n{named}```cpp\n{text}\n```\n"


def page() -> str:
    return "\n".join([HEAD, *map(section, headers())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
