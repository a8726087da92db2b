#!/usr/bin/env bash
# Rows by NIXL over the loopback, which the extra dev has not: it is installed beside the environment.
#   scripts/nixl.sh [FOLDER]     default: .nixl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-.nixl}")
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
if [ ! -d "$folder" ]; then
  "$python" -m pip install --quiet --no-deps --target "$folder.part" nixl==1.5.2 nixl-cu12==1.5.1
  mv "$folder.part" "$folder"
fi
export PYTHONPATH=$PWD/src:$PWD/tests:$folder${PYTHONPATH:+:$PYTHONPATH}
UCX_TLS=${UCX_TLS:-tcp,self} "$python" -m pytest -q tests/unit/sinks/test_tcp.py tests/system/test_tcp_kills.py
