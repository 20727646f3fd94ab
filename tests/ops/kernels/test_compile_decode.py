"""Decode kernels compiled for Hopper, on a machine without one: the interpreter knows no types and no registers."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper
from agentinfer.ops.kernels import tiles

# Prints, for each kernel, [name, bytes of shared memory, warp group products, what stands where in the PTX].
COMPILE = """
from agentinfer.ops.kernels import add_norm, attend_decode, embed, filter, gemm, gemv, sample, silu, tiles

MARKS = re.compile(r"griddepcontrol\\.[a-z_]+|ld\\.global|lg2\\.approx|cp\\.async\\.bulk\\.tensor|atom\\.")

def compiled(name, kernel, types, constants, **options):
    constants = dict(constants, PDL=True)
    done = compiled_for_hopper(kernel, types, constants, **options, launch_pdl=True)
    ptx = done.asm["ptx"]
    print(json.dumps([name, done.metadata.shared, ptx.count("wgmma.mma_async"), MARKS.findall(ptx)]))

half, wide = "*bf16", "*fp32"
for (n, k, gated), tile in [*tiles.GEMV.items(), ((576, 1536, False), tiles.gemv_tile(576, 1536, False))]:
    add = n < k
    compiled(f"gemv {n} {k}", gemv._gemv,
        dict(x=half if add else wide, norm=half, weight=half, scales=half, bias=half, out=wide if add else half,
             eps="fp32"),
        dict(N=n, K=k, BN=tile.rows, BK=tile.chunk, BLOCK=0, NORM=not add, BIAS=True, GLU=gated, ADD=add),
        num_warps=tile.warps)
for (rows, n, k, gated), tile in tiles.GEMM.items():
    compiled(f"gemm {tile.m} {n} {k}", gemm._gemm,
        dict(x=f"tensordesc<bf16[{tile.m}, {tile.k}]>", weight=f"tensordesc<bf16[{tile.n}, {tile.k}]>",
             bias=half, out=wide if tile.split > 1 else half, M="i32"),
        dict(N=n, K=k, BM=tile.m, BN=tile.n, BK=tile.k, STAGES=tile.stages, SPLIT=tile.split, BIAS=True, GLU=gated),
        num_warps=tile.warps)
for dtype in ("bf16", "fp32"):
    for rows, heads, group, dim in ((1, 8, 4, 128), (64, 8, 4, 128), (1, 3, 3, 64), (64, 2, 7, 64)):
        tile = tiles.attend_tile(rows, heads)
        padded = tiles.power_of_two(group)
        names = ("qkv", "q_norm", "k_norm", "k_cache", "v_cache", "out")
        types = dict.fromkeys(names, "*" + dtype) | dict.fromkeys(("cos_sin", "parts", "sums"), wide)
        types |= dict.fromkeys(("context", "table", "counters"), "*i32") | dict.fromkeys(("rows", "slots"), "*i64")
        types |= dict.fromkeys(("eps", "scale"), "fp32") | dict.fromkeys(("columns", "least", "whole"), "i32")
        compiled(f"attend {dtype} {rows} {heads}", attend_decode._attend_decode, types, dict(
            KV_HEADS=heads, GROUP=group, GP=max(16, padded), GC=padded, DIM=dim, BLOCK=16,
            APART=16 * heads * dim, TOKEN=heads * dim, HEAD=dim, WINDOW=100 * (dim == 64), EARLY=True, AHEAD=False,
            NORM=group != 7, KEYS=tile.keys, SPLITS=tile.splits, STAGES=tile.stages,
            AT_ONCE=max(1, min(tile.splits, attend_decode.SLICE * tile.warps // (padded * dim)))), num_warps=tile.warps)
compiled("add_norm", add_norm._add_norm, dict(
    x=wide, parts=wide, total=wide, weight=half, out=half, rows="*i64", eps="fp32", stride="i32"),
    dict(D=576, BD=1024, PARTS=2, GATHER=True, STORE=False))
compiled("silu", silu._silu_and_mul, dict(x=half, out=half), dict(F=1536, BF=1024))
compiled("embed", embed._embed, dict(ids="*i64", weight=half, out=wide), dict(D=576, BD=1024))
compiled("sample tiles", sample._sample_tiles, dict(
    logits=wide, asked="*i32", index="*i32", numbers=wide, maxima=wide),
    dict(STRIDE=75968, FIRST=75968, END=151936, C=20, BV=sample.TILE, CHUNK=filter.CHUNK, WORDS=8,
         GREEDY=1e-5, DEVICE=True))
asked = dict(WORDS=8, GREEDY=1e-5, SLACK=filter.SLACK, DEVICE=True)
row = dict(logits=wide, asked="*i32", index="*i32", bounds="*fp64", parts="*fp64", before="*fp64", tokens="*i64")
row |= dict(numbers=wide, maxima=wide, chunks="*i32")
compiled("filter begin", filter._begin, row, dict(
    asked, STRIDE=151936, V=151936, TILES=38, BT=64, C=1216, BC=2048, CHUNK=filter.CHUNK, GATHER=filter.GATHER,
    SPLITS=filter.SPLITS), num_warps=16)
look = dict(asked, STRIDE=151936, V=151936, C=1216, SPAN=19456, BV=filter.TILE, CHUNK=filter.CHUNK,
    GROUP=filter.GROUP, SPLITS=filter.SPLITS)
for first in (True, False):
    compiled("filter round", filter._round, row, dict(look, FIRST=first), num_warps=4)
compiled("filter settle", filter._settle, row, look, num_warps=8)
compiled("sample rows", sample._sample_rows, dict(
    numbers=wide, asked="*i32", tokens="*i64", ok="*i64"),
    dict(V=151936, C=38, BC=64, WORDS=8, GREEDY=1e-5))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Every kernel compiles, fits a multiprocessor, lets the next one begin first and then waits once; weights and keys
    are loaded before the wait, products of several rows use TMA (warp groups from 64 rows on), and noise alone uses the
    fast logarithm.
    """
    kernels = hopper.lines(COMPILE, tmp_path, 300)
    assert len(kernels) == len(tiles.GEMV) + 1 + len(tiles.GEMM) + 8 + 9
    for name, shared, products, marks in kernels:
        assert shared <= hopper.MOST_SHARED, name
        assert marks[0] == "griddepcontrol.launch_dependents", name
        assert marks.count("griddepcontrol.wait") == (name != "embed"), name
        assert ("cp.async.bulk.tensor" in marks) == name.startswith("gemm"), name
        assert (products > 0) == name.startswith(("gemm 64", "gemm 128")), name
        assert ("lg2.approx" in marks) == (name in ("sample tiles", "filter round", "filter settle")), name
        if name.startswith(("gemv", "attend")):
            assert "ld.global" in marks[: marks.index("griddepcontrol.wait")], name
