#!/usr/bin/env bash
# Writes every generated table of the documents, and the list of error messages; with --check, only compares.
#   scripts/docs.sh [--check]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${MIDSTREAM_VENV:-.venv}/bin/python
status=0
for script in scripts/models_table.py scripts/limits_table.py scripts/versions_table.py scripts/vllm_arguments.py benchmarks/table.py \
  scripts/messages.py; do
  "$python" "$script" "$@" || status=1
done
exit $status
