"""tools/cpp_reference.py, which makes a page from the C++ headers."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "cpp_reference.py"))


def test_the_page_is_that_of_the_headers() -> None:
    assert (ROOT / "docs" / "reference" / "cpp.md").read_text() == TOOL["page"](), "run python tools/cpp_reference.py"


def test_what_is_left_out() -> None:
    source = """\
#pragma once
namespace roundpipe {
namespace detail {
struct Hidden {};
}  // namespace detail
// Counts.
class Counter {
 public:
  explicit Counter(int start) : count_(start) {}
  // The number.
  int count() const { return count_; }
  template <typename T>
  void add(T more) {
    if (more > 0) {
      count_ += more;
    }
  }

  // -- for others --
  void reset();

 private:
  int count_;
};
struct Point {
  int x = 0;
};
}  // namespace roundpipe
"""
    lines = list(TOOL["without_definitions"](list(TOOL["without_blocks"](source.splitlines()))))
    assert [line for line in lines if line] == [
        "namespace roundpipe {",
        "// Counts.",
        "class Counter {",
        " public:",
        "  explicit Counter(int start);",
        "  // The number.",
        "  int count() const;",
        "  template <typename T>",
        "  void add(T more);",
        "};",
        "struct Point {",
        "  int x = 0;",
        "};",
        "}  // namespace roundpipe",
    ]
