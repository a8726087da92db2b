#!/usr/bin/env bash
# Builds the site of the documents into src/midstream/site, where `midstream docs` finds it and wheels take it.
#   scripts/site.sh [options of `mkdocs build`]     e.g. scripts/site.sh --site-dir /tmp/site
# Every warning is an error: pages, links, anchors and docstrings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-${MIDSTREAM_VENV:-.venv}/bin/python}
exec env NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict "$@"
