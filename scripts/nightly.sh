#!/usr/bin/env bash
# Slow tests: tests/nightly, tests marked `nightly` elsewhere, and tests that run longer when
# MIDSTREAM_NIGHTLY is set (support/nightly.py), such as properties with 500 examples.
#   scripts/nightly.sh [options of pytest]     MIDSTREAM_ADVERSARY_SEED=7 for other requests
# A mix that differs is written to MIDSTREAM_ADVERSARY_FOLDER, default nightly-results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export MIDSTREAM_NIGHTLY=1
export MIDSTREAM_ADVERSARY_FOLDER=${MIDSTREAM_ADVERSARY_FOLDER:-nightly-results}
export MIDSTREAM_ADVERSARY_SEED=${MIDSTREAM_ADVERSARY_SEED:-$(date +%Y%m%d)}
echo "seed $MIDSTREAM_ADVERSARY_SEED"
if [ $# -eq 0 ]; then
  mapfile -t longer < <(
    grep -rlE "support.nightly|mark.nightly|hypothesis" --include="test_*.py" tests | sort
  )
  set -- tests/nightly "${longer[@]}"
fi
exec "$python" -m pytest "$@"
