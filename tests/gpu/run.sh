#!/usr/bin/env bash
# All that needs a GPU, in one command, each step with its own time limit and all of it under LIMIT_S (580) seconds.
#
#   tests/gpu/run.sh [STEP ...]     default: facts tests kernels latency
#
#   facts      nvidia-smi, versions, `agentinfer env`
#   tests      pytest tests/gpu; PYTEST_ARGS="-k decode -x" chooses
#   kernels    benchmarks/gpu_kernels.py: each kernel against its byte floor
#   latency    `agentinfer bench latency` of Qwen3-0.6B; BENCH_ARGS="..." adds flags, MODEL=Qwen3-8B another model
#   gemm       products of 96 to 256 rows of Qwen3-0.6B by our own kernel, against cuBLAS
#   attention  benchmarks/gpu_attention.py: decode attention tile by tile, and sampling; ATTEND_ARGS="--rows 136" chooses
#   persistent the tests of the persistent kernel, and benchmarks/gpu_persistent.py: its step against Triton's; PERSISTENT_ARGS adds flags
#   ranks      two GPUs: tests/gpu/test_ranks.py, and benchmarks/gpu_ranks.py: sums between them, rows of shared models; RANKS_ARGS="--only sums" or "--profile 8b-eager 8b"
#              ranks-tests, ranks-bench: one of the two
#   acceptance benchmarks/acceptance_tp4.py on four GPUs: every bound of Qwen3-8B over four, judged; ACCEPT_ARGS="--tp 2 --only eager graphs"
#   latent     benchmarks/gpu_layer.py: every part of a DeepSeek-V2-Lite layer and the whole one, ours and vLLM's; LATENT_ARGS="--rows 1"
#   latent-tiles   benchmarks/gpu_experts.py: the same model's kernels tile by tile; TILES_ARGS="--only experts --rows 64"
#   sampling   benchmarks/gpu_sampling.py: what mixed sampling parameters add to a step of 256 rows
#   mix        `agentinfer bench throughput` of the same; mix-N: with --max-num-batched-tokens N
#   startup    `agentinfer bench startup` of the same
#   serve      benchmarks/gpu_serve.py: `agentinfer serve` in one process and in two, beside the offline loop; SERVE_ARGS="--only one" chooses
#   profile    a profiler's trace of 16 steps at batch 1, and its table (BENCH_ARGS="--batch-sizes 64": of another batch)
#   profile-N  the same at batch N, 1,073 keys a row, with noise
#   prefill-profile   a trace of 16 steps of mix that compute 8,192 positions of prompts, and its table
#   flash-attn build FlashAttention's forward kernels from .dev/flash_attn.tar.xz (tools/carry_flash_attn.sh), and its tests
#   vs-MODEL   benchmarks/vs_vllm.py: vs-Qwen3-8B, vs-Qwen3-0.6B, vs-DeepSeek-V2-Lite; VS_ARGS="--only mix" adds flags ("--side ours": without vLLM's),
#              OURS="--ops triton" adds them to `agentinfer bench`
#   memcheck   the small kernel tests under compute-sanitizer; MEMCHECK_K="gemv or sample" chooses
#
# Runs .venv/bin/python where there is one and no .dev, else python3, whose torch has CUDA; PYTHON=... is another.
# Reads, if there, .dev/py.tar.xz (tools/carry_gpu.sh: what that Python lacks) and .dev/site.tar.xz (vLLM as a folder); WITHOUT_VLLM=1 leaves it
# out. Writes to $OUT: log.txt with everything, and a JSON file a bench. TEST_S, BENCH_S: limits of one step (300, 150). TEST_JOBS: tests side by side (8; 0: in turn).
set -uo pipefail
cd "$(dirname "$0")/../.."
repo=$PWD
out=${OUT:-$repo/build/gpu}
scratch=${SCRATCH:-${TMPDIR:-/var/tmp}/agentinfer-gpu}
limit=${LIMIT_S:-580}
test_s=${TEST_S:-300}
bench_s=${BENCH_S:-150}
model=${MODEL:-Qwen3-0.6B}
mkdir -p "$out" "$scratch"
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ ! -d .dev ] && [ -x .venv/bin/python ] && python=$repo/.venv/bin/python
log=$out/log.txt
begin=$(date +%s)
failed=0

# --- surroundings ----------------------------------------------------------------------------------------------------
unpack() { # NAME: .dev/NAME.tar.xz to $scratch/NAME, once a machine
  [ -e "$repo/.dev/$1.tar.xz" ] || { echo "no .dev/$1.tar.xz"; return 0; }
  [ -e "$scratch/$1/.unpacked" ] && return 0
  mkdir -p "$scratch/$1" && tar -xJf "$repo/.dev/$1.tar.xz" -C "$scratch/$1" || return 1
  "$python" -m compileall -q -j 0 "$scratch/$1" > /dev/null 2>&1
  touch "$scratch/$1/.unpacked"
}
unpack py &
[ -n "${WITHOUT_VLLM:-}" ] || unpack site &
wait
"$python" -c 'import attrs, rpds, pytest, hypothesis' 2> /dev/null || PYTHONPATH=$scratch/py "$python" -c \
  'import attrs, rpds, pytest, hypothesis' || { echo "attrs, rpds, pytest or hypothesis is missing in $python"; exit 1; }
paths=$repo/src:$scratch/py
[ -n "${WITHOUT_VLLM:-}" ] || paths=$paths:$scratch/site
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# vLLM: no FlashInfer was carried, no multicast, no network.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
export VLLM_HOST_IP=127.0.0.1
# A program that uses NVLink multicast can take a shared host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# The machine's other pytest plugins warn, and our warnings are errors.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
test_command=("$python" -m pytest -p _hypothesis_pytestplugin -p xdist.plugin -n "${TEST_JOBS:-8}" -p no:cacheprovider)
echo "== unpacked after $(($(date +%s) - begin)) s" | tee -a "$log"

# --- steps -----------------------------------------------------------------------------------------------------------
step() { # NAME SECONDS COMMAND ...: all output to the log, the end of it here
  local name=$1 most=$2 left at status
  shift 2
  left=$((limit - ($(date +%s) - begin)))
  if [ "$left" -lt 15 ]; then
    echo "== $name: no time left" | tee -a "$log"
    failed=1
    return
  fi
  [ "$most" -gt "$left" ] && most=$left
  at=$(wc -c < "$log")
  echo "== $name: $*" >> "$log"
  local from
  from=$(date +%s)
  timeout -k 5 "$most" "$@" >> "$log" 2>&1
  status=$?
  [ "$status" -eq 0 ] || failed=1
  echo "== $name: status $status after $(($(date +%s) - from)) s of $most" | tee -a "$log"
  tail -c "+$((at + 1))" "$log" | grep -v '^== ' | tail -n "${SHOW:-30}" | cut -c 1-300
}

bench() { # NAME WHAT FLAGS ...
  local name=$1 what=$2
  shift 2
  # shellcheck disable=SC2086 # BENCH_ARGS holds several flags
  step "$name" "$bench_s" "$python" -m agentinfer bench "$what" "configs/$model" --dummy-weights --max-model-len 4096 \
    --output "$out/$name.json" "$@" ${BENCH_ARGS:-}
}

[ $# -gt 0 ] || set -- facts tests kernels latency
for wanted; do
  case $wanted in
    facts)
      step nvidia-smi 30 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
      step env 90 "$python" -m agentinfer env
      ;;
    tests)
      # shellcheck disable=SC2086
      step tests "$test_s" "${test_command[@]}" tests/gpu --ignore tests/gpu/test_ranks.py --durations=15 ${PYTEST_ARGS:-}
      ;;
    kernels) step kernels "$bench_s" "$python" benchmarks/gpu_kernels.py --json "$out/kernels.json" ;;
    latency) bench latency latency --batch-sizes 1,64,256 --contexts 128 --prefill 1024 --max-num-batched-tokens 8192 ;;
    gemm)
      step gemm "$bench_s" "$python" benchmarks/gpu_kernels.py --json "$out/gemm.json" --models Qwen3-0.6B --only gemm \
        --rows 136 256 96 --seconds $((bench_s - 20))
      ;;
    attention)
      # shellcheck disable=SC2086
      step attention $((bench_s + 40)) "$python" benchmarks/gpu_attention.py --json "$out/attention.json" \
        --seconds "$bench_s" ${ATTEND_ARGS:-}
      ;;
    persistent)
      # shellcheck disable=SC2086
      step persistent-tests 140 "${test_command[@]}" tests/gpu/test_persistent.py --durations=5 ${PYTEST_ARGS:-}
      # shellcheck disable=SC2086
      step persistent 120 "$python" benchmarks/gpu_persistent.py --json "$out/persistent.json" ${PERSISTENT_ARGS:-}
      ;;
    ranks | ranks-*)
      # shellcheck disable=SC2086
      [ "$wanted" = ranks-bench ] || step ranks-tests 300 "${test_command[@]}" -n 0 tests/gpu/test_ranks.py \
        --durations=9 ${PYTEST_ARGS:-}
      # shellcheck disable=SC2086
      [ "$wanted" = ranks-tests ] || step ranks-bench "$limit" "$python" benchmarks/gpu_ranks.py --json "$out/ranks.json" \
        --seconds $((limit - ($(date +%s) - begin) - 15)) ${RANKS_ARGS:-}
      ;;
    acceptance)
      # shellcheck disable=SC2086
      SHOW=80 step acceptance "$limit" "$python" benchmarks/acceptance_tp4.py --json "$out/acceptance.json" \
        --log "$out/acceptance.log" --seconds $((limit - ($(date +%s) - begin) - 10)) ${ACCEPT_ARGS:-}
      ;;
    latent)
      # shellcheck disable=SC2086
      SHOW=90 step latent 120 "$python" benchmarks/gpu_layer.py --json "$out/latent.json" --seconds 105 ${LATENT_ARGS:-}
      ;;
    latent-tiles)
      # shellcheck disable=SC2086
      SHOW=60 step latent-tiles 320 "$python" benchmarks/gpu_experts.py --json "$out/latent-tiles.json" --seconds 300 \
        --only one experts latent --rows 64 256 --contexts 256 ${TILES_ARGS:-}
      ;;
    sampling)
      step sampling "$bench_s" "$python" benchmarks/gpu_sampling.py --engine "configs/$model" --json "$out/sampling.json"
      ;;
    mix-*) bench "$wanted" throughput --temperature 0.6 --max-num-seqs 256 --max-num-batched-tokens "${wanted#mix-}" ;;
    mix) bench mix throughput --temperature 0.6 --max-num-seqs 256 --max-num-batched-tokens 8192 ;;
    serve)
      # shellcheck disable=SC2086
      step serve "$bench_s" "$python" benchmarks/gpu_serve.py "configs/$model" --json "$out/serve.json" \
        --seconds $((bench_s - 5)) ${SERVE_ARGS:-}
      ;;
    startup) bench startup startup --runs 2 ;;
    profile-*)
      bench "$wanted" latency --batch-sizes "${wanted#profile-}" --contexts 1073 --temperature 0.6 --runs 1 --steps 64 \
        --profile "$out/$wanted.json.gz"
      step "table-${wanted#profile-}" 60 "$python" benchmarks/trace_table.py "$out/$wanted.json.gz"
      ;;
    profile)
      bench profile latency --batch-sizes 1 --runs 1 --steps 64 --profile "$out/trace.json.gz"
      step table 60 "$python" benchmarks/trace_table.py "$out/trace.json.gz"
      ;;
    prefill-profile)
      bench prefill-profile throughput --temperature 0.6 --max-num-seqs 256 --max-num-batched-tokens 8192 \
        --requests 512 --output-tokens 2-4 --profile "$out/prefill.json.gz"
      step prefill-table 60 "$python" benchmarks/trace_table.py "$out/prefill.json.gz"
      ;;
    flash-attn)
      step flash-attn-build 430 tests/gpu/build_flash_attn.sh .dev/flash_attn.tar.xz "$scratch/flash_attn"
      PYTHONPATH=$scratch/flash_attn:$PYTHONPATH step flash-attn-tests 120 "${test_command[@]}" \
        tests/gpu/test_providers.py -k 'flash-attn and (bfloat16 or padding)'
      ;;
    vs-*)
      # shellcheck disable=SC2086
      step "$wanted" "$limit" "$python" benchmarks/vs_vllm.py --model "${wanted#vs-}" --json "$out/$wanted.json" \
        --log "$out/$wanted.log" --limit-s $((limit - ($(date +%s) - begin))) \
        ${OURS:+"--ours=$OURS"} ${VS_ARGS:-}
      ;;
    memcheck)
      step memcheck "$test_s" compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
        "${test_command[@]}" tests/gpu/test_kernels.py -x -k "${MEMCHECK_K:-small}"
      ;;
    *)
      echo "== $wanted is no step (see the head of this script)" | tee -a "$log"
      failed=1
      ;;
  esac
done
echo "== all: $(($(date +%s) - begin)) s, $([ $failed -eq 0 ] && echo 'every step passed' || echo 'something failed')" \
  | tee -a "$log"
exit $failed
