"""The sum over ranks compiled for Hopper, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sources

COMPILE = f"""
import json, re, sys
sys.path.insert(0, {str(sources.SRC)!r})
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from agentinfer.ops.kernels import all_reduce

MARKS = re.compile(r"(?:atom|ld\\.acquire|ld\\.global|st\\.global|bar)\\.[.a-z0-9]*")
for dtype in ("bf16", "fp16", "fp32"):
    for size, piece, warps in ((2, 2048, 4), (8, 2048, 4), (2, 16384, 8), (8, 16384, 8)):
        kernel = all_reduce._all_reduce
        constants = dict(RANK=1, SIZE=size, PIECE=piece, PIECES=256, FROM=1 << 20, PATIENCE=0)
        constants |= dict(SEND=True, ADD=True, PDL=True)
        types = dict(x="*" + dtype, out="*" + dtype, pointers="*i64", counters="*i32", UNITS="i32")
        places = {{x: "constexpr" if x in constants else types[x] for x in kernel.arg_names}}
        aligned = {{(i,): [["tt.divisibility", 16]] for i, x in enumerate(places.values()) if x.startswith("*")}}
        import triton
        done = triton.compile(ASTSource(kernel, places, constants, aligned), target=GPUTarget("cuda", 90, 32),
                              options=dict(num_warps=warps))
        print(json.dumps([size, piece // warps // 512, MARKS.findall(done.asm["ptx"])]))
        if piece < 16384 or dtype == "fp32":
            continue
        kernel = all_reduce._all_reduce_norm
        constants |= dict(D=4096, BD=4096, PARTS=2)
        types |= dict(parts="*fp32", residual="*fp32", weight="*" + dtype, eps="fp32", stride="i32")
        places = {{x: "constexpr" if x in constants else types[x] for x in kernel.arg_names}}
        constants = {{x: constants[x] for x in kernel.arg_names if x in constants}}
        aligned = {{(i,): [["tt.divisibility", 16]] for i, x in enumerate(places.values()) if x.startswith("*")}}
        done = triton.compile(ASTSource(kernel, places, constants, aligned), target=GPUTarget("cuda", 90, 32),
                              options=dict(num_warps=8))
        print(json.dumps([size, 2, MARKS.findall(done.asm["ptx"])]))
"""


@pytest.mark.slow
def test_it_compiles_for_hopper(tmp_path: Path) -> None:
    """Each rank is sent data and then, after a barrier, a flag that releases it to the whole system; each flag is
    acquired before what it stands for is read, past the first cache; data goes 16 bytes at a time.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 16
    for size, words, marks in lines:
        released = [i for i, mark in enumerate(marks) if "sys.release" in mark]
        acquired = [i for i, mark in enumerate(marks) if "sys.acquire" in mark]
        sent = [i for i, mark in enumerate(marks[: released[0]]) if mark.startswith("st.global.v4")]
        read = [i for i, mark in enumerate(marks) if i > released[0] and mark == "ld.global.cg.v4.b32"]
        assert len(released) == size - 1
        assert len(sent) == len(read) == words * (size - 1)
        assert len(acquired) >= size - 1
        assert "bar.sync" in marks[sent[-1] : released[0]]
        assert "bar.sync" in marks[acquired[-1] : read[0]]
        assert acquired[-1] < read[0]
