"""Builds the documentation as a site with search, in build/site: make site

The pages are those of docs/, the reports, the README, CONTRIBUTING.md and CHANGELOG.md, laid out as in the repository,
so that their links lead to the same places. The navigation is docs/README.md. A link or an anchor that leads nowhere
ends the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "docs/**/*.png", "bench/results/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
INDEX_ITEM = re.compile(r"^- \[[^]]+\]\((?P<target>[^)]+)\)")


def copy_pages() -> None:
    """Copies all pages, and the files of the repository that they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    linked = [
        (page.parent / target).resolve()
        for page in pages
        if page.suffix == ".md"
        for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in target
    ]
    for file in dict.fromkeys([*pages, *(path for path in linked if path.is_file())]):
        copy = SOURCE / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def titled(page: str) -> dict[str, str]:
    """An entry of the navigation: the page's heading, and its path below the root."""
    heading = next(line for line in (SOURCE / page).read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return {heading.removeprefix("# "): page}


def navigation() -> list[dict[str, Any]]:
    """The README, then the sections of docs/README.md with their pages."""
    sections: list[dict[str, Any]] = [{"RoundPipe": "README.md"}]
    pages: list[Any] = []
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            pages = []
            sections.append({line.removeprefix("## "): pages})
        elif item := INDEX_ITEM.match(line):
            path = (ROOT / "docs" / item["target"]).resolve().relative_to(ROOT)
            pages.append(titled(str(path)))
    reports = sorted((SOURCE / "bench" / "results").glob("*.md"), reverse=True)
    measured = next(section["Measure it"] for section in sections if "Measure it" in section)
    # A list in a section is folded.
    measured.append({"Reports": [titled(str(report.relative_to(SOURCE))) for report in reports]})
    return sections


def configuration() -> dict[str, object]:
    """mkdocs' configuration."""
    return {
        "site_name": "RoundPipe",
        "site_description": "Train models larger than device memory",
        "docs_dir": str(SOURCE),
        "site_dir": str(SITE),
        # Pages open from a folder, too, without a server.
        "use_directory_urls": False,
        "strict": True,
        "theme": {
            "name": "material",
            "font": False,
            "features": [
                "navigation.sections",
                "navigation.top",
                "toc.follow",
                "search.highlight",
                "content.code.copy",
            ],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        # offline: where the browser has a network, the search works without a server, too.
        "plugins": [{"search": {"lang": ["en", "zh"]}}, "offline"],
        "markdown_extensions": [
            "tables",
            "attr_list",
            {"toc": {"permalink": True, "slugify": "SLUGIFY"}},
            {"pymdownx.superfences": {"relaxed_headers": True}},
            {"pymdownx.highlight": {"use_pygments": True}},
        ],
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"}},
        "nav": navigation(),
    }


def main() -> int:
    copy_pages()
    text = yaml.safe_dump(configuration(), allow_unicode=True, sort_keys=False)
    # Anchors as on GitHub, with the letters of other scripts.
    slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
    file = ROOT / "build" / "mkdocs.yml"
    file.write_text(text.replace("SLUGIFY", slugify), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(file)]
    # Material advertises its successor otherwise. `--quiet` would also switch strictness off.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        print(f"wrote {SITE.relative_to(ROOT)}/index.html")
    else:
        print(
            *(line for line in run.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))),
            sep="\n",
            file=sys.stderr,
        )
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
