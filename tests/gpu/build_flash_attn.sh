#!/usr/bin/env bash
# Build FlashAttention 2.8's forward kernels (bfloat16, head dims 64 and 128, Hopper) from tools/carry_flash_attn.sh's
# archive, side by side and without ninja, so that a compiler that fails says which file: minutes on 16 cores.
#
#   tests/gpu/build_flash_attn.sh ARCHIVE DIR        DIR: put it on PYTHONPATH to import flash_attn
set -euo pipefail
archive=$1
into=$2
jobs=${JOBS:-$(nproc)}
mkdir -p "$into"
tar -xJf "$archive" -C "$into"
cd "$into"

mapfile -t torch < <(python3 - <<'PY'
import sysconfig
import torch
from torch.utils import cpp_extension as c

paths = [*c.include_paths("cuda"), sysconfig.get_paths()["include"], "csrc/flash_attn", "csrc/flash_attn/src"]
print(" ".join(f"-I{path}" for path in [*paths, "csrc/cutlass/include"]))
print(" ".join(f"-L{path} -Wl,-rpath,{path}" for path in c.library_paths("cuda")))
print(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
print(sysconfig.get_config_var("EXT_SUFFIX"))
PY
)
include=${torch[0]} library=${torch[1]} abi=${torch[2]} suffix=${torch[3]}
less="-DFLASHATTENTION_DISABLE_DROPOUT -DFLASHATTENTION_DISABLE_ALIBI -DFLASHATTENTION_DISABLE_SOFTCAP -DFLASHATTENTION_DISABLE_BACKWARD"
common="-O3 -std=${CXX_STANDARD:-c++17} $less $abi -DTORCH_EXTENSION_NAME=flash_attn_2_cuda -DTORCH_API_INCLUDE_EXTENSION_H $include"
export common
compile() { # FILE
  local from
  from=$(date +%s)
  case $1 in
    *.cu)
      # shellcheck disable=SC2086
      nvcc $common -gencode arch=compute_90,code=sm_90 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ \
        -U__CUDA_NO_HALF2_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__ --expt-relaxed-constexpr \
        --expt-extended-lambda --use_fast_math -w -Xcompiler -fPIC -c "$1" -o "$1.o"
      ;;
    *)
      # shellcheck disable=SC2086
      g++ $common -w -fPIC -c "$1" -o "$1.o"
      ;;
  esac
  echo "$(($(date +%s) - from)) s: $1"
}
export -f compile
# those with splits take longest, so they go first
{ ls csrc/flash_attn/src/flash_fwd_split_*.cu csrc/flash_attn/flash_api.cpp csrc/flash_attn/src/flash_fwd_hdim*.cu; } \
  | xargs -P "$jobs" -I{} bash -c 'compile {}'
# shellcheck disable=SC2086
g++ -shared -o "flash_attn_2_cuda$suffix" csrc/flash_attn/flash_api.cpp.o csrc/flash_attn/src/*.cu.o \
  $library -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python -lc10 -lc10_cuda -lcudart
PYTHONPATH=$into python3 -c 'import flash_attn; print("flash_attn", flash_attn.__version__)'
