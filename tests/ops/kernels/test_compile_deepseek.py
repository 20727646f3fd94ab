"""Kernels of latent attention and experts compiled for Hopper, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper

# Prints, for each kernel, [name, bytes of shared memory, warp group products, bytes spilled, what stands in the PTX].
COMPILE = """
from agentinfer.ops.kernels import attend_latent as a, attend_made as m, expert_gemm as g, expert_gemv as v
from agentinfer.ops.kernels import expert_rows, latent_write, route, route_one, tiles

MARKS = re.compile(r"griddepcontrol\\.[a-z_]+|ld\\.global|cp\\.async\\.bulk\\.tensor|cp\\.async\\.cg|mma\\.sync")

def compiled(name, kernel, types, constants, *, pdl=True, **options):
    constants = dict(constants, **(dict(PDL=True) if pdl else {}))
    done = compiled_for_hopper(kernel, types, constants, **options, launch_pdl=pdl)
    ptx = done.asm["ptx"]
    marks = MARKS.findall(ptx)
    print(json.dumps([name, done.metadata.shared, ptx.count("wgmma.mma_async"), spilled(ptx), marks]), flush=True)

for dtype, size in (("bf16", 2), ("fp32", 4)):
    half, wide = "*" + dtype, "*fp32"
    for rows, heads in ((1, 16), (64, 16), (256, 16), (1, 128), (256, 128)):
        if dtype == "fp32" and (heads > 16 or rows == 64):
            continue
        t, name = a.latent_tile(rows, heads, size), f"{dtype} {rows} {heads}"
        parts = half if t.splits == 1 else wide
        types = dict.fromkeys(("q", "inner", "latent", "norm", "cache", "kv_b", "out"), half)
        types |= dict(cos_sin=wide, parts=parts, sums=wide, table="*i32", rows="*i64", context="*i32", slots="*i64")
        types |= dict(eps="fp32", scale="fp32", columns="i32", least="i32", T="i32")
        compiled("attend " + name, a._attend, types, dict(
            HEADS=heads, HP=t.heads, STRIDE=heads * 192 + 576, QUERY=192, U=128, L=512, P=64,
            APART_NEW=heads * 192 + 576, BLOCK=16, APART=16 * 576, TOKEN=576, INTERLEAVED=True, KEYS=t.keys,
            SPLITS=t.splits, STAGES=t.stages), num_warps=t.warps)
        compiled("absorb " + name, a._absorb, types, dict(
            STRIDE=heads * 192 + 576, HEADS=heads, QUERY=192, U=128, WIDE=256, L=512, APART=512,
            BM=16 if rows < 17 else 64, BL=64), num_warps=4)
        same = dict(HEADS=heads, U=128, O=128, L=512, KEYS=t.keys, SPLITS=t.splits)
        if rows == 1:
            compiled("values " + name, a._values_singly, types, dict(same, BO=16, AT_ONCE=16), num_warps=4)
        else:
            compiled("values " + name, a._values, types, dict(same, BM=16, BO=32), num_warps=8)
    types = dict(q=half, made=half, latents=half, cos_sin=wide, work="*i32", out=half, scale="fp32")
    compiled("made " + dtype, m._attend_made, types, dict(
        STRIDE=16 * 192 + 576, HEADS=16, U=128, P=64, L=512, O=128, INTERLEAVED=True, QUERIES=64,
        KEYS=64 if size == 2 else 32, STAGES=2), pdl=False, num_warps=4)
    types = dict(latent=half, norm=half, cos_sin=wide, positions="*i64", slots="*i64", cache=half, eps="fp32")
    for heads in (0, 16, 128):
        compiled("write " + dtype, latent_write._latent_write, dict(types, q=half, out=half), dict(
            L=512, P=64, STRIDE=3648, BLOCK=16, APART=16 * 576, TOKEN=576, INTERLEAVED=True, HEADS=heads,
            HP=max(1, heads), QUERY=192, Q_STRIDE=3648), pdl=False, num_warps=4)
    for experts, chosen, f, d in ((64, 6, 1408, 2048), (256, 8, 2048, 7168)):
        which = f"{dtype} {experts}"
        if which == "fp32 256":
            continue
        types = dict(x=half, router=wide, out=wide, T="i32")
        compiled("logits " + which, route._logits, types, dict(E=experts, D=d, BT=4, BE=4, BD=1024), num_warps=4)
        types = dict(logits=wide, bias=wide, weights=wide, experts="*i64", scale="fp32", least="fp32")
        v3 = experts == 256
        compiled("choose " + which, route._choose, types, dict(
            E=experts, K=chosen, GROUPS=8 if v3 else 1, KEPT=4 if v3 else 1, GP=8 if v3 else 1, PP=32 if v3 else 64,
            KP=8, SOFTMAX=not v3, NORMALISE=v3, TOP2=v3, BIAS=v3, FIRST=32, HELD=32), num_warps=1)
        types |= dict(x=wide, norm=half, router=wide, normed=half, counters="*i32", eps="fp32")
        compiled("one route " + which, route_one._route_one, types, dict(
            D=d, BD=tiles.power_of_two(d), NORM=True, E=experts, K=chosen, GROUPS=8 if v3 else 1, KEPT=4 if v3 else 1,
            GP=8 if v3 else 1, PP=32 if v3 else 64, KP=8, SOFTMAX=not v3, NORMALISE=v3, TOP2=v3, BIAS=v3, FIRST=0,
            HELD=experts), num_warps=8 if v3 else 4)
        types = dict(chosen="*i64", pairs="*i32", tiles="*i32", used="*i32", M="i32")
        compiled("rows " + which, expert_rows._sort, types, dict(E=experts, EP=experts, ROWS=16, CHUNK=1024),
                 num_warps=4)
        types = dict(x=half, act=half, weight=half, shared=half, weights=wide, experts="*i64", out=half)
        first, second = tiles.gemv_tile((chosen + 2) * f, d, True), v.down_tile(d, f)
        same = dict(D=d, F=f, K=chosen, S=2, ABSENT=v3)
        compiled("one gate " + which, v._gate_up, types, dict(same, BN=first.rows, BK=first.chunk),
                 num_warps=first.warps)
        compiled("one down " + which, v._down, dict(types, out=wide), dict(same, BN=second.rows, BK=second.chunk),
                 num_warps=second.warps)
        for pairs in (12, 384, 1536, 2500, 49152) if size == 2 else (12,):
            t = g.expert_tile(pairs, 64, size)
            desc = lambda rows: f"tensordesc<{dtype}[{rows}, {t.k}]>"
            types = dict(x=half, weight=desc(t.n), act=desc(t.rows), pairs="*i32", experts="*i32", used="*i32",
                         out=half, weights=wide, M="i32", T="i32")
            same = dict(D=d, F=f, K=chosen, ROWS=t.rows, BN=t.n, BK=t.k, STAGES=t.stages)
            compiled(f"gate {which} {t.rows}", g._gate_up, types, same, num_warps=t.warps)
            compiled(f"down {which} {t.rows}", g._down, dict(types, out=wide), same, num_warps=t.warps)
"""


@pytest.mark.slow
def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """Every kernel compiles and fits a multiprocessor, in bfloat16 without spilling; those of a decode step let the
    next one begin first and wait once; experts' weights come by TMA, and large tiles are products of warp groups.
    """
    kernels = hopper.lines(COMPILE, tmp_path, 600)
    for name, shared, products, spilled, marks in kernels:
        assert shared <= hopper.MOST_SHARED, name
        assert spilled == 0 or "fp32" in name, name  # float32 is for tests
        if not name.startswith(("made", "write")):
            assert marks[0] == "griddepcontrol.launch_dependents", name
            assert marks.count("griddepcontrol.wait") == 1, name
        assert ("cp.async.bulk.tensor" in marks) == name.startswith(("gate", "down")), name
        if name.endswith((" 64", " 128")) and name.startswith(("gate bf16", "down bf16")):
            assert products > 0, name
        if name.startswith("attend bf16"):
            assert (products > 0) == name.endswith("128"), name
            assert "cp.async.cg" in marks, name
