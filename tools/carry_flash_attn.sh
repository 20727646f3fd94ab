#!/usr/bin/env bash
# Pack what the forward kernels of FlashAttention 2.8 need to be built on a GPU machine (tests/gpu/flash_attn.sh), into
# .dev/flash_attn.tar.xz: bfloat16, head dims 64 and 128, no backward, dropout, ALiBi or soft cap.
#
#   tools/carry_flash_attn.sh [DIR]        DIR: where the archive goes (default: .dev, which git ignores)
#
# Needs a Python with torch, packaging, psutil and wheel (the package's own setup imports them): PYTHON=.venv/bin/python.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.dev}
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$out"

FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --no-binary flash-attn --no-build-isolation --dest "$work" 'flash-attn==2.8.*'
mkdir "$work/all" "$work/some"
tar -xzf "$work"/flash_attn-*.tar.gz -C "$work/all" --strip-components=1

"$python" - "$work/all" "$work/some" <<'PY'
import re
import shutil
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
kernels = source / "csrc/flash_attn/src"
into = target / "csrc/flash_attn/src"
into.mkdir(parents=True)
wanted = [*kernels.glob("*.h"), *kernels.glob("*.cuh"), *kernels.glob("flash_fwd_*hdim64_bf16_*.cu"),
          *kernels.glob("flash_fwd_*hdim128_bf16_*.cu")]
for path in wanted:
    shutil.copy(path, into)
shutil.copy(source / "csrc/flash_attn/flash_api.cpp", into.parent)
for part in ("cute", "cutlass"):
    shutil.copytree(source / "csrc/cutlass/include" / part, target / "csrc/cutlass/include" / part)
(target / "flash_attn").mkdir()
for name in ("__init__.py", "flash_attn_interface.py"):
    shutil.copy(source / "flash_attn" / name, target / "flash_attn")
shutil.copy(source / "LICENSE", target)


def replace(path, pattern, new):
    """Exactly one place: another release that reads otherwise stops here."""
    text, count = re.subn(pattern, lambda _: new, path.read_text(), flags=re.DOTALL)
    assert count == 1, (path, pattern, count)
    path.write_text(text)


switch = into / "static_switch.h"
replace(switch, r"#define FP16_SWITCH\(COND, \.\.\.\).*?\}\(\)\n", """#define FP16_SWITCH(COND, ...) \\
  [&] { \\
    TORCH_CHECK(!(COND), "built for bfloat16 alone"); \\
    using elem_type = cutlass::bfloat16_t; \\
    return __VA_ARGS__(); \\
  }()
""")
replace(switch, r"#define HEADDIM_SWITCH\(HEADDIM, \.\.\.\).*?\}\(\)\n", """#define HEADDIM_SWITCH(HEADDIM, ...) \\
  [&] { \\
    TORCH_CHECK(HEADDIM == 64 || HEADDIM == 128, "built for head dims 64 and 128 alone"); \\
    if (HEADDIM == 64) { \\
      constexpr static int kHeadDim = 64; \\
      return __VA_ARGS__(); \\
    } else { \\
      constexpr static int kHeadDim = 128; \\
      return __VA_ARGS__(); \\
    } \\
  }()
""")
replace(into.parent / "flash_api.cpp", r"run_mha_bwd_<elem_type, kHeadDim, Is_causal>\(params, stream\);",
        'TORCH_CHECK(false, "built without backward");')
PY
tar -C "$work/some" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | xz -T0 -6 > "$out/flash_attn.tar.xz"
ls -l "$out/flash_attn.tar.xz"
rm -r "$work"
