#!/usr/bin/env bash
# Exports for draft models, read by speculators and SpecForge, and speculators' online training. These need other packages than the
# extra dev has, so this installs them alone, into a folder beside the virtual environment.
#   scripts/trainers.sh [FOLDER]     default: .trainers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-.trainers}")
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
if [ ! -d "$folder" ]; then
  "$python" -m pip install --quiet --no-deps --target "$folder.part" \
    speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0
  mv "$folder.part" "$folder"
fi
export PYTHONPATH=$PWD/src:$PWD/tests:$folder${PYTHONPATH:+:$PYTHONPATH}
"$python" -m pytest -q tests/lab/export/test_draft_readers.py tests/system/test_online.py \
  tests/system/test_draft_head.py
