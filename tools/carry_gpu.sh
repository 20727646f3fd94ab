#!/usr/bin/env bash
# Pack what our package and tests need on a GPU machine that can reach no package index, into .dev/py.tar.xz.
#
#   tools/carry_gpu.sh [DIR]        DIR: where py.tar.xz goes (default: .dev, which git ignores)
#
# For CPython 3.12 on x86-64 Linux, in the versions of constraints.txt; torch, Triton, numpy, safetensors, tokenizers,
# transformers and huggingface_hub are that machine's own. tests/gpu/run.sh unpacks it there.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.dev}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/whl" "$work/site"

# The control plane and text (attrs .. markupsafe), the tests (pytest .. sortedcontainers), the server (starlette .. typing-extensions).
names="attrs rpds-py tqdm jinja2 markupsafe pytest pytest-xdist execnet pluggy iniconfig packaging pygments hypothesis sortedcontainers"
names+=" starlette uvicorn msgspec prometheus-client anyio h11 click idna typing-extensions"
wanted=()
for name in $names; do
  pin=$(grep -iE "^${name//-/[-_]}==" constraints.txt) || { echo "$name is not in constraints.txt" >&2; exit 1; }
  wanted+=("$pin")
done
wanted+=("nvidia-ml-py>=12") # pynvml, for the samples of `agentinfer bench`: no dependency of ours, so no pin

platforms=()
for n in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform any)
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work/whl" \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" "${wanted[@]}"

python3 - "$work" <<'PY'
import sys
import zipfile
from pathlib import Path

work = Path(sys.argv[1])
for wheel in sorted((work / "whl").glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        # NAME.data/ holds scripts and headers: nothing that an import finds
        archive.extractall(work / "site", [n for n in archive.namelist() if ".data/" not in n])
PY
tar -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | xz -T0 -6 > "$out/py.tar.xz"
ls "$work/whl"
ls -l "$out/py.tar.xz"
