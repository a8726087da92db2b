#!/usr/bin/env bash
# TransformerLens 4.3 with its RemoteBridge on midstream. sae-lens, of the extra dev, needs an older
# one, so this installs it into a folder beside the virtual environment, and runs
#   1. midstream's tests of the bridge
#   2. TransformerLens's own tests of its driver, from its source distribution, on midstream's:
#      two ranks, and two stages of a pipeline, each against one rank, with the prefix cache on
#   scripts/transformer_lens.sh [FOLDER]     default: .transformer-lens
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-.transformer-lens}")
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
release=4.3.0
if [ ! -d "$folder/transformer_lens-$release" ]; then
  mkdir -p "$folder"
  "$python" -m pip install --quiet --no-deps --target "$folder/site" "transformer-lens==$release"
  "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --dest "$folder" "transformer-lens==$release"
  tar -xzf "$folder/transformer_lens-$release.tar.gz" -C "$folder"
fi
export PYTHONPATH=$folder/site:$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export VLLM_CPU_KVCACHE_SPACE=1
"$python" -m pytest -q tests/engine/test_remote_bridge.py
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
cd "$folder/transformer_lens-$release"
# An engine of theirs in a process, as theirs say.
for tests in \
  unit/model_bridge/test_driver_protocol.py \
  unit/model_bridge/test_remote_bridge.py \
  acceptance/model_bridge/test_vllm_multigpu.py \
  acceptance/model_bridge/test_vllm_multigpu_pos.py \
  acceptance/model_bridge/test_vllm_multigpu_pp.py; do
  "$python" -m pytest -q -o addopts= -p support.transformer_lens_suite "tests/$tests"
done
