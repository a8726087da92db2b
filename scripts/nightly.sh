#!/usr/bin/env bash
# The tests that take long: thousands of random requests, eager and compiled, each held against the
# same request alone; and those that run longer when MIDSTREAM_NIGHTLY is set (helpers/nightly.py).
#   scripts/nightly.sh [options of pytest]     MIDSTREAM_ADVERSARY_SEED=7 for other requests
# A mix that differs is written to MIDSTREAM_ADVERSARY_FOLDER, default nightly-results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export MIDSTREAM_NIGHTLY=1
export MIDSTREAM_ADVERSARY_FOLDER=${MIDSTREAM_ADVERSARY_FOLDER:-nightly-results}
export MIDSTREAM_ADVERSARY_SEED=${MIDSTREAM_ADVERSARY_SEED:-$(date +%Y%m%d)}
echo "seed $MIDSTREAM_ADVERSARY_SEED"
mapfile -t longer < <(grep -rlE "helpers.nightly|mark.nightly" --include="test_*.py" tests | sort)
exec "$python" -m pytest "${longer[@]}" "$@"
