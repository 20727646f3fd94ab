"""Prefill kernels compiled for Hopper, on a machine without one: the interpreter knows no types and no registers."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper

# Prints, for each kernel, [name, bytes of shared memory, products by warp groups].
COMPILE = """
import torch
from agentinfer.ops.kernels import attend_prefill as a, qk_rope_write as q

def compiled(name, kernel, types, constants, **options):
    done = compiled_for_hopper(kernel, types, constants, **options)
    print(json.dumps([name, done.metadata.shared, done.asm["ptx"].count("wgmma.mma_async")]))

def attend(name, dtype, tile, dim, heads, kv_heads, window):
    types = {x: "*" + dtype for x in ("q", "k_cache", "v_cache", "out")}
    types |= {"table": "*i32", "work": "*i32", "scale": "fp32", "columns": "i32", "window": "i32"}
    compiled(name, a._attend_tiles, types, dict(
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=16, ROWS=tile.rows, KEYS=tile.keys, WINDOW=window,
        STAGES=tile.stages), num_warps=tile.warps, num_stages=tile.stages)

for keep in (False, True):
    types = {x: "*bf16" for x in ("qkv", "q_out", "k_out", "k_cache", "v_cache", "q_norm", "k_norm")}
    types |= {"positions": "*i64", "slots": "*i64", "cos_sin": "*fp32", "count": "i32", "eps": "fp32"}
    compiled("qk_rope_write", q._qk_rope_write, types, dict(
        HEADS=9, KV_HEADS=3, DIM=64, BT=q.POSITIONS, NORM=not keep, KEEP=keep), num_warps=4)
for dtype, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
    for dim, heads, kv_heads in ((128, 32, 8), (64, 9, 3)):
        whole, window = a.chunk_tile(kind, dim, 8192 * heads), dim == 64
        attend(f"chunk {dtype} {dim}", dtype, whole, dim, heads, kv_heads, window)
        attend(f"few {dtype} {dim}", dtype, a.chunk_tile(kind, dim, 128 * heads), dim, heads, kv_heads, False)
        attend(f"single {dtype} {dim}", dtype, a.single_tile(kind), dim, heads, kv_heads, not window)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Every kernel compiles and fits a multiprocessor, and chunks of two bytes a number use the tensor cores of warp
    groups.
    """
    kernels = hopper.lines(COMPILE, tmp_path, 300)
    assert len(kernels) == 14
    for name, shared, products in kernels:
        assert shared <= hopper.MOST_SHARED, name
        assert (products > 0) == (name.startswith(("chunk bf16", "few bf16"))), name
