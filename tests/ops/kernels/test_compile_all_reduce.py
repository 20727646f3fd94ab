"""The sum over ranks compiled for Hopper, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper

COMPILE = """
from agentinfer.ops.kernels import all_reduce

MARKS = re.compile(r"(?:atom|ld\\.acquire|ld\\.global|st\\.global|bar)\\.[.a-z0-9]*")
for dtype in ("bf16", "fp16", "fp32"):
    for size, piece, warps in ((2, 2048, 4), (8, 2048, 4), (2, 16384, 8), (8, 16384, 8)):
        constants = dict(RANK=1, SIZE=size, PIECE=piece, PIECES=256, FROM=1 << 20, PATIENCE=0)
        constants |= dict(SEND=True, ADD=True, PDL=True)
        types = dict(x="*" + dtype, out="*" + dtype, pointers="*i64", counters="*i32", UNITS="i32")
        done = compiled_for_hopper(all_reduce._all_reduce, types, constants, num_warps=warps)
        print(json.dumps([size, piece // warps // 512, MARKS.findall(done.asm["ptx"])]))
        if piece < 16384 or dtype == "fp32":
            continue
        constants |= dict(D=4096, BD=4096, PARTS=2)
        types |= dict(parts="*fp32", residual="*fp32", weight="*" + dtype, eps="fp32", stride="i32")
        done = compiled_for_hopper(all_reduce._all_reduce_norm, types, constants, num_warps=8)
        print(json.dumps([size, 2, MARKS.findall(done.asm["ptx"])]))
"""


@pytest.mark.slow
def test_it_compiles_for_hopper(tmp_path: Path) -> None:
    """Each rank is sent data and then, after a barrier, a flag that releases it to the whole system; each flag is
    acquired before what it stands for is read, past the first cache; data goes 16 bytes at a time.
    """
    lines = hopper.lines(COMPILE, tmp_path, 300)
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
