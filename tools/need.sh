#!/usr/bin/env bash
# Before anything is downloaded: names all that this machine lacks to build, and the line that installs it. Installs
# nothing. Needed are a C++20 compiler, and a Python of at least 3.11 with the venv module and its C headers.
#
#   tools/need.sh PYTHON [own-torch]      own-torch: PYTHON need not bring its own pip along
set -euo pipefail
python=${1:?usage: tools/need.sh PYTHON [own-torch]} own_torch=${2:-}

lacks=() packages=()
# $1: what is missing, then Debian's packages of it
missing() { lacks+=("$1") packages+=("${@:2}"); }

need_compiler() {
  local compiler=${CXX:-} name folder
  for name in c++ g++ clang++; do
    [ -n "$compiler" ] || compiler=$(command -v $name) || true
  done
  [ -n "$compiler" ] || { missing "a C++20 compiler" g++; return; }
  folder=$(mktemp -d)
  # CXX may be a compiler with options.
  printf '%s\n' '#include <barrier>' '#include <concepts>' '#include <span>' 'template <typename T>' \
    'concept Sized = requires(T t) { { t.size() } -> std::convertible_to<int>; };' 'static_assert(Sized<std::span<int>>);' \
    'int main() { std::barrier<> all(1); all.arrive_and_wait(); }' >"$folder/probe.cpp"
  $compiler -std=c++20 -pthread "$folder/probe.cpp" -o "$folder/probe" >"$folder/said" 2>&1 || {
    sed 's/^/  /' "$folder/said" | head -n 5 >&2
    missing "a C++20 compiler: $compiler does not compile and link C++20. Another one is named so: CXX=g++-12 make ..." g++
  }
  rm -r "$folder"
}

need_python() {
  local name=${python##*/}
  "$python" -c pass 2>/dev/null || { missing "$python, a Python of at least 3.11" "$name" "$name-venv" "$name-dev"; return; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "error: $python is $("$python" --version), expected 3.11 or newer; name another: make PYTHON=python3.12" >&2; exit 1; }
  name=$("$python" -c 'import sys; print("python{}.{}".format(*sys.version_info))')
  "$python" -c "import venv$([ -n "$own_torch" ] || echo ", ensurepip")" 2>/dev/null || missing "$python's venv module" "$name-venv"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing "$python's C headers (Python.h)" "$name-dev"
}

need_compiler
need_python
[ ${#lacks[@]} = 0 ] && exit
{
  printf 'error: this machine lacks %s\n' "${lacks[@]}"
  echo "install it, then run make again. On Debian and Ubuntu:"
  echo "  $([ $EUID = 0 ] || echo "sudo ")apt-get install ${packages[*]}"
} >&2
exit 1
