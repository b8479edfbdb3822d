#!/usr/bin/env bash
# Installs packages, and says which large ones are being downloaded. What else pip says is shown if it fails: warnings
# of its configuration and of root would drown the rest.
#
#   tools/pip_install.sh PYTHON WHAT...      WHAT: arguments for `pip install`
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pip install --disable-pip-version-check --no-compile --no-input --progress-bar off "${@:2}" 2>&1 | tee "$log" |
  sed -unE 's|^ *Downloading (.*/)?([^ /]+) \(([0-9]{2,}(\.[0-9]+)? MB)\)$|  downloading \2, \3|p'
status=${PIPESTATUS[0]}
[ "$status" = 0 ] || cat "$log" >&2
exit "$status"
