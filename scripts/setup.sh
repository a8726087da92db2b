#!/usr/bin/env bash
# Creates .venv with midstream (editable), vLLM and the extras; takes seconds if it is up to date.
#   scripts/setup.sh [extra ...]      extras besides the one for this machine's vLLM, e.g. dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${MIDSTREAM_VENV:-.venv}
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  build=gpu
else
  build=cpu
fi
extras=$(IFS=,; echo "$build${*:+,$*}")
wanted="$extras $(sha256sum pyproject.toml | cut -d' ' -f1)"
stamp=$venv/.midstream-$(echo "$extras" | tr ',' '-')
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
# The extra dev contains the others.
developers="$build,dev ${wanted#* }"
if [ "$(cat "$venv/.midstream-$build-dev" 2>/dev/null)" = "$developers" ]; then
  exit 0
fi

python=${PYTHON:-python3}
# vLLM 0.32 and later, of which one is the CPU build, have no distribution for Python 3.10.
"$python" - "$([ "$build" = cpu ] && echo 11 || echo 10)" <<'CHECK'
import sys
least = int(sys.argv[1])
if not (3, least) <= sys.version_info[:2] <= (3, 13):
    found = sys.version.split()[0]
    sys.exit(f"this set-up needs Python 3.{least} to 3.13, found {found}; set PYTHON=…")
CHECK

echo "setting up $venv with vLLM's $build build; this takes about five minutes the first time"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet --editable ".[$extras]"
if [ "$build" = cpu ]; then
  # The CPU build of vLLM pulls in CUDA builds of these, which break `import transformers`.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
  # Image processors need torchvision's Python part alone, which asks for two operators of the other.
  "$venv/bin/python" - <<'VISION'
from importlib.util import find_spec
from pathlib import Path

added = """

if not _has_ops():  # added by midstream's scripts/setup.sh
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""
folder = find_spec("torchvision")
if folder is not None:
    extension = Path(folder.origin).parent / "extension.py"
    text = extension.read_text(encoding="utf-8")
    if added not in text:
        extension.write_text(text + added, encoding="utf-8")
VISION
fi
case ",$extras," in
*,dev,*)
  # For tests/browser, which are skipped without one.
  if ! command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null 2>&1; then
    "$venv/bin/python" -m playwright install chromium ||
      echo "no Chromium: tests/browser will be skipped (apt-get install chromium)"
  fi
  ;;
esac
echo "$wanted" > "$stamp"
