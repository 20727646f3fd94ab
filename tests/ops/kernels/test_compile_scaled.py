"""Kernels for weights of 8 bits compiled for Hopper, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper

# Prints, for each kernel, [name, bytes of shared memory, products of warp groups, bytes spilled, marks of the PTX].
COMPILE = """
from agentinfer.ops.kernels import gemv, quantize, scaled_experts as e, scaled_gemm as g

MARKS = re.compile(r"griddepcontrol\\.[a-z_]+|ld\\.global|cp\\.async\\.bulk\\.tensor|mma\\.sync")

def compiled(name, kernel, types, constants, **options):
    constants = dict(constants, PDL=True, BLOCK=128)
    done = compiled_for_hopper(kernel, types, constants, **options, launch_pdl=True)
    ptx = done.asm["ptx"]
    kinds = sorted(set(re.findall(r"wgmma\\.mma_async\\S*\\.f32\\.(\\w+)\\.\\w+", ptx)))
    print(json.dumps([name, done.metadata.shared, kinds, spilled(ptx), MARKS.findall(ptx)]), flush=True)

half, wide, small = "*bf16", "*fp32", "*fp8e4nv"
compiled("quantize", quantize._quantize, dict(x=half, out=small, scales=wide, largest="fp32", least="fp32", T="i32"),
         dict(K=7168, G=quantize.GROUPS), num_warps=4)
for n, k, gated in ((2112, 7168, False), (24576, 1536, False), (7168, 16384, False), (18432, 7168, True)):
    t, add = gemv.tile_of(n, k, gated, scaled=True), n < k
    compiled(f"gemv {n} {k}", gemv._gemv,
        dict(x=half if add else wide, norm=half, weight=small, scales=wide, bias=half, out=wide if add else half,
             eps="fp32"),
        dict(N=n, K=k, BN=t.rows, BK=t.chunk, NORM=not add, BIAS=False, GLU=gated, ADD=add), num_warps=t.warps)
    for rows in (16, 32, 64, 4096):
        if n == 24576 and rows != 4096:
            continue
        t, rounded = g.scaled_tile(rows, n, k, gated, partial=rows < 65 and not gated), rows > 64
        of = "fp8e4nv" if rounded else "bf16"
        compiled(f"gemm {of} {rows} {n}", g._scaled_gemm,
            dict(x=f"tensordesc<{of}[{t.m}, 128]>", weight=f"tensordesc<fp8e4nv[{t.n}, 128]>", scales=wide,
                 row_scales=wide, bias=half, out=half, M="i32"),
            dict(N=n, K=k, BM=t.m, BN=t.n, STAGES=t.stages, SPLIT=t.split, BIAS=False, GLU=gated, ROUNDED=rounded),
            num_warps=t.warps)
for pairs in (8, 4000, 10000, 65536):
    t = e.scaled_expert_tile(pairs, 256)
    of = "fp8e4nv" if t.rounded else "bf16"
    types = dict(x="*" + of, x_scales=wide, act=f"tensordesc<{of}[{t.rows}, 128]>", act_scales=wide,
                 weight=f"tensordesc<fp8e4nv[{t.n}, 128]>", scales=wide, pairs="*i32", experts="*i32", used="*i32",
                 out=half, weights=wide, M="i32", T="i32")
    same = dict(D=7168, F=2048, K=8, ROWS=t.rows, BN=t.n, STAGES=t.stages, ROUNDED=t.rounded)
    compiled(f"gate {of} {t.rows}", e._gate_up, types, same, num_warps=t.warps)
    compiled(f"down {of} {t.rows}", e._down, dict(types, out=wide), same, num_warps=t.warps)
"""


@pytest.mark.slow
def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """Every kernel compiles and fits a multiprocessor without spilling, lets the next one begin first and waits once;
    weights come by TMA, and all products are of warp groups, of 8 bits where activations are rounded.
    """
    kernels = hopper.lines(COMPILE, tmp_path, 600)
    assert len(kernels) == 1 + 4 + 13 + 8
    for name, shared, kinds, spilled, marks in kernels:
        assert shared <= hopper.MOST_SHARED, name
        assert spilled == 0, name
        assert marks[0] == "griddepcontrol.launch_dependents", name
        assert marks.count("griddepcontrol.wait") == 1, name
        product = name.startswith(("gemm", "gate", "down"))
        assert ("cp.async.bulk.tensor" in marks) == product, name
        assert "mma.sync" not in marks, name
        assert kinds == (["e4m3" if "fp8" in name else "bf16"] if product else []), name
        if name.startswith("gemv"):
            assert "ld.global" in marks[: marks.index("griddepcontrol.wait")], name
