#!/usr/bin/env bash
# For `make ... TORCH=skip`: a virtual environment that uses the torch of another Python, and all that lies beside it.
# No package index is needed: what neither that Python nor an index has is named, and stays missing.
#
#   tools/own_torch.sh make ENVIRONMENT PYTHON          makes ENVIRONMENT, which sees the packages of PYTHON
#   tools/own_torch.sh install ENVIRONMENT WHAT...      installs what is missing of these requirements
#   tools/own_torch.sh package ENVIRONMENT HOW...       installs the package, pip told HOW, or puts it on the path
set -euo pipefail
verb=${1:-} environment=${2:-}

# For a Python that cannot bring its own pip along, the one that PYTHON has is seen in ENVIRONMENT.
make_environment() {
  "$1" -c 'import torch' ||
    { echo "error: $1 has no torch, which TORCH=skip asks for; name the Python that has it: make PYTHON=..." >&2; exit 1; }
  local flags=()
  "$1" -c 'import ensurepip' 2>/dev/null || flags=(--without-pip)
  "$1" -m venv "${flags[@]}" "$environment"
  # Where packages lie, nested .pth files included. A Python in another virtual environment has them there.
  "$1" -c '
import site
folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
print(*(f"import site; site.addsitedir({folder!r})" for folder in folders), sep="\n")' >"$(packages)/own_torch.pth"
}

packages() { "$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

pip_install() {
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" 2>/dev/null
}

install_missing() {
  local wanted missing=()
  pip_install --no-index "$@" || pip_install --retries 0 --timeout 5 "$@" || {
    for wanted in "$@"; do pip_install --no-index "$wanted" || missing+=("$wanted"); done
    echo "note: not installed, since no package index has answered: ${missing[*]}"
  }
}

install_package() {
  pip_install --no-index "$@" || pip_install --retries 0 --timeout 5 "$@" || {
    # Before the packages of the other Python, which may have a roundpipe of its own.
    echo "import sys; sys.path.insert(0, '$(realpath python)')" >"$(packages)/roundpipe_source.pth"
    echo "note: the package is used from python/, without the command roundpipe: not all that it asks for is there"
  }
  local found
  found=$("$environment/bin/python" -P -c 'import importlib.util; print(importlib.util.find_spec("roundpipe").origin)')
  [ "$found" = "$(realpath python)/roundpipe/__init__.py" ] || {
    echo "error: roundpipe is $found, expected the one in $(realpath python); uninstall the other one, or name" \
      "a Python without it: make PYTHON=..." >&2
    exit 1
  }
}

case $verb in
  make) make_environment "$3" ;;
  install) install_missing "${@:3}" ;;
  package) install_package "${@:3}" ;;
  *) echo "usage: tools/own_torch.sh make ENVIRONMENT PYTHON | install ENVIRONMENT WHAT... | package ENVIRONMENT HOW..." >&2; exit 1 ;;
esac
