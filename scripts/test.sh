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
# Two files at a time: most of an engine test is Python on one core. tests/conftest.py has the long
# ones come first.
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
