#!/usr/bin/env bash
# Sets up on a machine with only Python and pip, then captures, steers and shows a real model.
#   scripts/demo.sh [options of `midstream demo`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh docs plot  # for `midstream docs`, and the report's charts
exec "${MIDSTREAM_VENV:-.venv}/bin/midstream" demo "$@"
