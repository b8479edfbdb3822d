#!/usr/bin/env bash
# Installs packages. Says which large ones are being downloaded, and once that an index does not answer; what else pip
# says is shown if it fails. Warnings of its configuration and of root would drown the rest.
#
#   tools/pip_install.sh PYTHON WHAT...      WHAT: arguments for `pip install`
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pip install --disable-pip-version-check --no-compile --no-input --progress-bar off "${@:2}" 2>&1 | tee "$log" | awk '
  / MB\)$/ && $1 == "Downloading" && substr($3, 2) + 0 >= 10 { sub(".*/", "", $2); print "  downloading " $2, $3, $4; fflush() }
  /^WARNING: Retrying/ && !retries++ { print; fflush() }'
status=${PIPESTATUS[0]}
[ "$status" = 0 ] || cat "$log" >&2
exit "$status"
