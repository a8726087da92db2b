#!/usr/bin/env bash
# Sets up like scripts/demo.sh, then runs the linters, the type checker and the tests.
#   scripts/test.sh [options of pytest]     e.g. scripts/test.sh -m "not engine"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
bin=${MIDSTREAM_VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest "$@"
