#!/usr/bin/env bash
# Tests and benchmarks on a GPU: the kernel, both of vLLM's model runners, and midstream's overhead.
#   scripts/gpu_check.sh [FOLDER]      results (JSON and logs) go to FOLDER, default gpu-results
# Continues after a failure, prints a short table last, and exits 1 if anything failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-results}
mkdir -p "$out"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
table=""
failed=0

check() { # NAME COMMAND…
  local name=$1 start=$SECONDS verdict=ok
  shift
  "$@" >"$out/$name.log" 2>&1 || { verdict=FAILED; failed=1; tail -n 25 "$out/$name.log"; }
  table+=$(printf '%-22s %-7s %4d s  %s' "$name" "$verdict" $((SECONDS - start)) \
    "$(grep -E '^[0-9]+ (passed|failed)|passed|failed' "$out/$name.log" | tail -n 1)")$'\n'
}

every="kernel transport v2 v1 spec mix serve serving stale parity flat overhead capture against disk"
# With two GPUs (four for some checks), also the checks of several ranks.
[ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] && every+=" ranks overhead-tp"
wanted=" ${CHECKS:-$every} "
# One process per engine: vLLM does not release an engine's memory within a process.
runner() { # NAME USE_V2 DTYPE
  check "$1-$3" env VLLM_USE_V2_MODEL_RUNNER="$2" MIDSTREAM_GPU_DTYPE="$3" \
    "$python" -m pytest -q tests/gpu/test_smollm2.py
  # The formulas are compared in float32, without rounding to bfloat16.
  [ "$3" = bfloat16 ] || check "$1-operations" env VLLM_USE_V2_MODEL_RUNNER="$2" \
    "$python" -m pytest -q tests/gpu/test_operations.py
}
asked() { [[ $wanted == *" $1 "* ]]; }
asked kernel && check kernel "$python" -m pytest -q tests/gpu/test_site_triton.py
asked transport && check transport-tests "$python" -m pytest -q tests/unit/transport tests/gpu/test_codecs.py
for name in transport step_cost; do
  asked transport && check $name "$python" benchmarks/$name.py --json "$out/$name.json"
  asked transport && grep -v -i warning "$out/$name.log"
done
for dtype in ${DTYPES:-float32 bfloat16}; do
  asked v2 && runner v2 1 $dtype
  asked v1 && runner v1 0 $dtype
done
# A separate engine for each speculation method, with and without asynchronous scheduling.
asked spec && check spec "$python" -m pytest -q -s tests/gpu/test_speculative.py
asked spec && grep -E '^spec ' "$out/spec.log"
# Random mixes with forced preemption; each request is compared with the same request alone.
asked mix && for runner in 1 0; do
  check "mix-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q -s tests/gpu/test_adversarial.py
  grep -aE -A14 '^v[12], seed' "$out/mix-v$((runner + 1)).log"
done
# A server with CUDA graphs, end to end, and its shutdown.
asked serve && check serve "$python" -m pytest -q --durations=8 tests/system/test_serving.py \
  tests/system/test_serving_ends.py
models=${MIDSTREAM_MODELS:-.models}
asked serving && check serving "$python" benchmarks/serving.py --json "$out/serving.json" \
  --model "$models/SmolLM2-135M-Instruct" -- --gpu-memory-utilization=0.3 --max-model-len=2048
asked serving && grep -E '^  with' "$out/serving.log"
asked ranks && check ranks "$python" -m pytest -q --durations=12 tests/system/test_ranks.py
asked overhead-tp && check overhead-tp "$python" benchmarks/overhead.py --tp 2 --shapes 8b \
  --json "$out/overhead-tp.json"
asked overhead-tp && grep -v -i warning "$out/overhead-tp.log" | tail -n 40
asked stale && check stale "$python" -m pytest -q tests/gpu/test_stale_graph.py
asked parity && check parity "$python" benchmarks/parity.py --json "$out/parity.json"
asked parity && grep -E '^(float32|bfloat16)' "$out/parity.log"
asked flat && check flat "$python" benchmarks/flat_cost.py --json "$out/flat_cost.json"
asked flat && grep -v -i warning "$out/flat.log" | tail -n 60
asked overhead && check overhead "$python" benchmarks/overhead.py --json "$out/overhead.json"
asked overhead && cat "$out/overhead.log" | grep -v -i warning | tail -n 60
# Cost and throughput of captures, in memory and on disk.
for shape in ${SHAPES:-0.6b 8b}; do
  asked capture && check capture-$shape "$python" benchmarks/capture_cost.py --shapes $shape \
    --json "$out/capture_cost-$shape.json"
  asked capture && grep -E '^( |[^ ]+,)' "$out/capture-$shape.log" | tail -n 30
  asked against && check against-$shape "$python" benchmarks/against.py --shapes $shape \
    --json "$out/against-$shape.json"
  asked against && grep -E '^( |[^ ]+,)' "$out/against-$shape.log" | tail -n 12
done
asked disk && check disk "$python" benchmarks/disk.py --json "$out/disk.json"
asked disk && grep 'of dd' "$out/disk.log"
printf '\n%s' "$table"
exit $failed
