#!/usr/bin/env bash
# Installs the newest wheel into an environment of its own and runs the demo there, with no compiler in reach.
#
#   tools/test_wheel.sh PYTHON DIST ENVIRONMENT
#
# ENVIRONMENT is replaced. torch comes from the same index as everything else.
set -euo pipefail
python=$1 dist=$(realpath "$2") environment=$3

rm -rf "$environment"
"$python" -m venv "$environment"
bin=$(realpath "$environment")/bin
wheel=$(ls -t "$dist"/*.whl | head -n 1)
(cd "$dist" && sha256sum --check --quiet SHA256SUMS)
echo "test-wheel: installing $(basename "$wheel")"
tools/pip_install.sh "$bin/python" "$wheel"

# Away from the source folder, so that only the installed package can be found.
cd "$environment"
env -i HOME="$HOME" PATH="$bin" "$bin/roundpipe" --version
env -i HOME="$HOME" PATH="$bin" "$bin/roundpipe" demo --steps 2 --out run
env -i HOME="$HOME" PATH="$bin" "$bin/python" - <<'PYTHON'
import roundpipe, roundpipe._built_with, roundpipe.compatibility as compatibility

roundpipe._built_with.TORCH = "1.0.0"
try:
    compatibility.require_fitting_build()
except ImportError as refused:
    assert "built with torch 1.0.0" in str(refused), refused
else:
    raise SystemExit("error: [test-wheel] another torch was not refused")
PYTHON
echo "test-wheel: $(basename "$wheel") works"
