#!/usr/bin/env bash
# Builds the site, and with it the wheel and the sdist into dist/, checks both, and tags the commit.
#   scripts/release.sh          build and check
#   scripts/release.sh --tag    the same, then create the tag vVERSION; nothing is uploaded
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/midstream/version.py)

fail() {
  echo "error: $1" >&2
  exit 1
}

[ -n "$version" ] || fail "src/midstream/version.py has no line __version__ = \"…\""
if [ "${1:-}" = --tag ]; then
  [ -z "$(git status --porcelain)" ] || fail "the working tree has uncommitted changes"
  grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
    fail "CHANGELOG.md has no heading '## $version (YYYY-MM-DD)'"
  ! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || fail "tag v$version exists"
elif [ $# -gt 0 ]; then
  fail "unknown argument '$1'; expected --tag or nothing"
fi

rm -rf dist
PYTHON=$python scripts/site.sh
"$python" -m build
"$python" -m twine check --strict dist/*
"$python" -m pytest -q tests/unit/test_distribution.py
if [ "${1:-}" = --tag ]; then
  git tag -a "v$version" -m "midstream $version"
  echo "tagged v$version; push the tag, then upload with: python -m twine upload dist/*"
fi
ls -l dist
