#!/usr/bin/env bash
# One device call after the other, each under 590 s; what they write is in $OUT (see tests/gpu/run.sh).
#
#   benchmarks/gpu_session.sh checks       all tests, the persistent kernel beside Triton's, sampling with mixed parameters
#   benchmarks/gpu_session.sh kernels      tests, attention and sampling tile by tile, products of 96 to 256 rows
#   benchmarks/gpu_session.sh mix          Qwen3-0.6B's mix with 8,192 and 16,384 positions a step, a profile of prefill,
#                                          and of decode steps of 136 rows
#   benchmarks/gpu_session.sh vs MODEL     vLLM beside us: Qwen3-0.6B, Qwen3-8B
#   benchmarks/gpu_session.sh flash-attn   build FlashAttention, run its tests
#
# Carry .dev/py.tar.xz; for checks, mix and vs .dev/site.tar.xz too, for flash-attn .dev/flash_attn.tar.xz.
set -uo pipefail
cd "$(dirname "$0")/.."
export LIMIT_S=${LIMIT_S:-580}
case ${1:-} in
  checks)
    export TEST_S=${TEST_S:-330} BENCH_S=${BENCH_S:-90} TEST_JOBS=${TEST_JOBS:-10} SHOW=${SHOW:-60}
    exec tests/gpu/run.sh tests sampling persistent
    ;;
  kernels)
    # All tests: every kernel is launched in another way. Without vLLM those of its kernels are skipped.
    export WITHOUT_VLLM=1 TEST_S=${TEST_S:-200} BENCH_S=${BENCH_S:-150} SHOW=${SHOW:-80}
    export ATTEND_ARGS=${ATTEND_ARGS:---rows 136 256 64 --groups 2}
    exec tests/gpu/run.sh tests attention gemm
    ;;
  mix)
    export BENCH_S=${BENCH_S:-110}
    exec tests/gpu/run.sh mix mix-16384 prefill-profile profile-136
    ;;
  vs) exec tests/gpu/run.sh "vs-${2:?which model}" ;;
  flash-attn) WITHOUT_VLLM=1 exec tests/gpu/run.sh flash-attn ;;
  *)
    sed -n '2,13p' "$0"
    exit 2
    ;;
esac
