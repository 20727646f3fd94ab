"""One row times a weight, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
from attrs import astuple
from torch import Tensor

from agentinfer.ops import norm
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.tiles import GEMV, GemvTile, gemv_tile


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("tile", "n", "k"), [(None, 24, 192), (GemvTile(8, 64, 1), 32, 128), (GemvTile(4, 64, 1), 9, 100)]
)
def test_every_prologue_and_epilogue(
    tile: GemvTile | None, n: int, k: int, bias: bool, normed: bool, gated: bool, add: bool
) -> None:
    """Norm, bias, gate and residual in any combination equal the reference, tiles that do not divide the shape too."""
    x, weight, scale = rand(1, k), rand(2 * n if gated else n, k, seed=1) / 10, 1 + 0.2 * rand(k, seed=2)
    b = rand(len(weight), seed=3) if bias else None
    residual = rand(1, n, seed=4) if add else None
    want = torch.nn.functional.linear(norm.rms_norm(x, scale, 1e-6) if normed else x, weight, b)
    want = norm.silu_and_mul(want) if gated else want
    want = want if residual is None else residual + want
    got = gemv(
        x, weight, torch.float32, norm_K=scale if normed else None, eps=1e-6, bias=b, gated=gated, add_to=residual,
        tile=tile,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got is residual) == add


@pytest.mark.parametrize(
    ("n", "k", "gated"),
    [*GEMV, (960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False), (49152, 576, False),
     (1152, 896, False), (4864, 896, True), (896, 4864, False), (64, 64, False), (1, 48, False), (5120, 25600, False)],
)  # fmt: skip
def test_tiles_of_any_shape_fit(n: int, k: int, gated: bool) -> None:
    """Every shape gets powers of two, at most half a chunk of waste, and registers for its first chunk."""
    rows, chunk, warps = astuple(gemv_tile(n, k, gated))
    assert all(x & (x - 1) == 0 for x in (rows, chunk, warps))
    assert -(-k // chunk) * chunk <= max(64, 1.25 * k)
    assert rows * chunk * (2 if gated else 1) <= 128 * 32 * warps or warps == 1


def test_half_precision_is_rounded_once() -> None:
    """With float16 weights and a float32 row, the result is the float32 result rounded."""
    x, weight, scale = rand(1, 128), (rand(16, 128, seed=1) / 10).half(), (1 + 0.2 * rand(128, seed=2)).half()
    want = norm.rms_norm(x, scale.float(), 1e-6) @ weight.float().t()
    got = gemv(x, weight, torch.float16, norm_K=scale, eps=1e-6)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), want, rtol=1e-3, atol=1e-5)
