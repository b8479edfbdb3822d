#!/usr/bin/env bash
# Makes sure that what cannot come from PyPI is on the machine. As root, with apt-get at hand, it installs what is
# missing; else it says what to install.
#
#   tools/need.sh python PYTHON   a Python of at least 3.11 that can make virtual environments and build extensions
#   tools/need.sh json            nlohmann's JSON header, for the engine
#   tools/need.sh doctest         doctest's header, for the C++ tests
#   tools/need.sh cli11           CLI11's header, for programs without Python
set -euo pipefail

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

install() {
  echo "need: installing $*"
  DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

give_up() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

need_python() {
  local python=$1
  command -v "$python" >/dev/null || give_up "no '$python' on the path; install Python 3.11 or newer, or name one: make PYTHON=..."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    give_up "$("$python" --version) is too old; name a Python of at least 3.11: make PYTHON=python3.12"
  complete() {
    "$python" -c '
import ensurepip, os, sys, sysconfig, venv
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null
  }
  complete && return
  local version
  version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
  can_install && install "python$version-venv" "python$version-dev" || true
  complete || give_up "$python lacks the venv module or its C headers (Python.h)" \
    "install them (Debian and Ubuntu: apt-get install python$version-venv python$version-dev), then run make again"
}

has_header() { echo "#include <$1>" | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; }

# What CMake is told in another way, it finds by itself or says so.
need_json() {
  has_header nlohmann/json.hpp && return
  can_install && install nlohmann-json3-dev || true
  has_header nlohmann/json.hpp || echo "note: no nlohmann/json.hpp where the compiler looks; CMake looks further" \
    "(Debian and Ubuntu: apt-get install nlohmann-json3-dev; macOS: brew install nlohmann-json)"
}

need_doctest() {
  has_header doctest/doctest.h && return
  can_install && install doctest-dev || true
  has_header doctest/doctest.h || give_up "the C++ tests need doctest" \
    "install it (Debian and Ubuntu: apt-get install doctest-dev; macOS: brew install doctest), then run make again"
}

need_cli11() {
  has_header CLI/CLI.hpp && return
  can_install && install libcli11-dev || true
  has_header CLI/CLI.hpp || echo "note: no CLI/CLI.hpp where the compiler looks; without it, roundpipe-train is not built" \
    "(Debian and Ubuntu: apt-get install libcli11-dev; macOS: brew install cli11)"
}

case ${1:-} in
  python) need_python "${2:-python3}" ;;
  json) need_json ;;
  doctest) need_doctest ;;
  cli11) need_cli11 ;;
  *) give_up "usage: tools/need.sh python PYTHON | json | doctest | cli11" ;;
esac
