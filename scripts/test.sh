#!/usr/bin/env bash
# Sets up like scripts/demo.sh, then runs the linters and the type checker beside the tests.
#   scripts/test.sh [options of pytest]     e.g. scripts/test.sh -m "not engine"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
bin=${MIDSTREAM_VENV:-.venv}/bin
checks=$(mktemp)
run=$(mktemp --suffix=.xml)
trap 'rm -f "$checks" "$run"' EXIT
{
  "$bin/ruff" check . && "$bin/ruff" format --check . && "$bin/mypy"
} >"$checks" 2>&1 &
lint=$!
# Two files at a time: most of an engine test is Python on one core. tests/conftest.py has the long
# ones come first. A file's tests stay together: they share fixtures. (Not `loadgroup`: pytest-xdist
# 3.8 does not group with pytest 9.2.)
# A test that pytest-timeout's signal does not reach (its thread waits outside Python) would last for
# ever: after a minute more, every thread's stack is printed and its process is ended and replaced.
status=0
"$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --junitxml="$run" \
  -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true --max-worker-restart=2 "$@" ||
  status=$?
# After a run of all tests, name the files that are much slower than recorded. Timings fail no run.
if [ $# -eq 0 ] && [ $status -eq 0 ]; then
  "$bin/python" scripts/durations.py check "$run" || true
fi
wait $lint || { status=1; printf 'ruff or mypy failed:\n'; }
cat "$checks"
exit $status
