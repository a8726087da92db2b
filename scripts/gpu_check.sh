#!/usr/bin/env bash
# Tests and benchmarks on a GPU: the kernel, both of vLLM's model runners, and midstream's overhead.
#   scripts/gpu_check.sh [FOLDER]      results (JSON and logs) go to FOLDER, default gpu-results
# CHECKS selects groups, SHAPES the models of the benchmarks, and BUDGET the seconds of each of them.
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

bench() { # GROUP NAME SCRIPT OPTIONS… A benchmark that stops by itself; prints its tables
  asked "$1" || return 0
  local name=$2 script=$3
  shift 3
  check "$name" "$python" "benchmarks/$script.py" --seconds "${BUDGET:-400}" \
    --json "$out/$name.json" "$@"
  grep -a '^|' "$out/$name.log"
}

every="kernel transport v2 v1 inner spec mix serve stale parity identical overhead flat stream capture"
every+=" against attention lens sae acting guards sweep serving disk quantised images families"
every+=" scores long weights cached"
# With two GPUs (four for some checks), also the checks of several ranks.
[ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] && every+=" ranks overhead-tp"
wanted=" ${CHECKS:-$every} "
# One process per engine: vLLM does not release an engine's memory within a process.
runner() { # NAME USE_V2 DTYPE
  check "$1-$3" env VLLM_USE_V2_MODEL_RUNNER="$2" MIDSTREAM_GPU_DTYPE="$3" \
    "$python" -m pytest -q tests/gpu/test_smollm2.py
  check "$1-$3-rows" env VLLM_USE_V2_MODEL_RUNNER="$2" \
    "$python" -m pytest -q tests/engine/test_short_rows.py -k "$3"
  # The formulas are compared in float32, without rounding to bfloat16.
  [ "$3" = bfloat16 ] || check "$1-operations" env VLLM_USE_V2_MODEL_RUNNER="$2" \
    "$python" -m pytest -q tests/gpu/test_operations.py
}
asked() { [[ $wanted == *" $1 "* ]]; }
asked kernel && check kernel "$python" -m pytest -q tests/gpu/test_site_triton.py \
  tests/gpu/test_scan_triton.py tests/gpu/test_attention_scores.py
asked transport && check transport-tests "$python" -m pytest -q tests/unit/transport tests/gpu/test_codecs.py
asked transport && check transport "$python" benchmarks/transport.py --json "$out/transport.json"
asked transport && grep -v -i warning "$out/transport.log"
bench transport step_cost step_cost
for dtype in ${DTYPES:-float32 bfloat16}; do
  asked v2 && runner v2 1 $dtype
  asked v1 && runner v1 0 $dtype
done
# Sites inside layers, the model's ends, attention rows: the engines' tests, eager and compiled.
asked inner && for runner in 1 0; do
  check "inner-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner MIDSTREAM_NIGHTLY=1 \
    "$python" -m pytest -q tests/engine/test_inner_sites.py tests/engine/test_attention.py \
    tests/engine/test_bias.py tests/engine/test_ends.py tests/engine/test_routing.py \
    tests/engine/test_lens.py tests/engine/test_maps.py
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
# Each quantisation of weights, and of the KV cache, against hooks; what a capture changes in FP8.
asked quantised && check quantised "$python" -m pytest -q tests/gpu/test_quantised.py
asked quantised && grep -aE '^(quantised|compiled) ' "$out/quantised.log"
# Edits in images and beside them in one prefix cache, where images' tokens attend both ways.
asked images && for runner in 1 0; do
  check "images-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q tests/gpu/test_image_cache.py
  grep -a '^images: ' "$out/images-v$((runner + 1)).log"
done
# The most used families by their published shapes, against hooks and compiled.
asked families && for runner in 1 0; do
  check "families-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q tests/gpu/test_families.py
  grep -a '^families ' "$out/families-v$((runner + 1)).log"
done
# Kept scores, families of probes, a prompt of a million tokens, sleep and other weights; sums and
# gates that are kept, rows that stay on the device.
for runner in 1 0; do
  asked scores && check "scores-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q tests/engine/test_score_cache.py tests/engine/test_probe_families.py
  asked long && check "long-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q tests/gpu/test_long_prompt.py
  # vLLM's allocator of engines that sleep serves one engine of a process.
  for tapped in startup lazy; do
    asked weights && check "weights-v$((runner + 1))-$tapped" env \
      VLLM_USE_V2_MODEL_RUNNER=$runner "$python" -m pytest -q tests/gpu/test_weights.py -k "$tapped"
  done
  asked cached && check "cached-v$((runner + 1))" env VLLM_USE_V2_MODEL_RUNNER=$runner \
    "$python" -m pytest -q tests/engine/test_sum_cache.py tests/engine/test_gate_cache.py \
    tests/engine/test_device_rows.py
done
# A server with CUDA graphs, end to end, and its shutdown.
asked serve && check serve "$python" -m pytest -q --durations=8 tests/system/test_serving.py \
  tests/system/test_serving_ends.py
# vLLM makes the group of expert ranks if the first model of a process has experts.
asked ranks && for which in "not experts" experts; do
  check "ranks-${which// /-}" "$python" -m pytest -q --durations=12 tests/system/test_ranks.py -k "$which"
done
bench overhead-tp overhead-tp overhead --tp 2 --shapes 8b --batches --prefill-prompts 256 --rounds 9 --asked "add at every layer, K = 1"
asked stale && check stale "$python" -m pytest -q tests/gpu/test_stale_graph.py
asked parity && check parity "$python" benchmarks/parity.py --json "$out/parity.json"
asked parity && grep -E '^(float32|bfloat16)' "$out/parity.log"
# Four engines of 8B do not fit on a GPU of 80 GiB.
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
plain=$((${memory:-0} > 100000 ? 2 : 1))
for shape in ${SHAPES:-0.6b 8b}; do
  bench identical identical-$shape identical --shapes $shape
  bench overhead overhead-$shape overhead --shapes $shape
  bench flat flat-$shape flat_cost --shapes $shape
  bench stream stream-$shape stream --shapes $shape
  bench capture capture-$shape capture_cost --shapes $shape
  bench against against-$shape against --shapes $shape
  bench attention attention-$shape attention_cost --shapes $shape
  bench lens lens-$shape lens_cost --shapes $shape
  bench sae sae-$shape sae_cost --shapes $shape --kv-gib 4 --rounds 3
  bench guards guards-$shape guards --shapes $shape --kv-gib $((2 * plain + 2)) --plain-engines "$plain"
  bench acting acting-$shape acting --shapes $shape --kv-gib 4 --plain-engines "$plain" --by sequences
  bench acting acting-streams-$shape acting --shapes $shape --kv-gib 4 --by streams --rounds 3
done
bench sweep sweep sweep
bench serving serving serving --client-cpus 4 -- --max-model-len=2048
bench disk disk disk --gib 8 /dev/shm "${TMPDIR:-/tmp}"
printf '\n%s' "$table"
exit $failed
