"""Products with weights of 8 bits in Triton's interpreter, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import norm, scaled
from agentinfer.ops.kernels.quantize import quantize
from agentinfer.ops.kernels.scaled_gemm import ScaledTile, scaled_gemm, scaled_tile
from agentinfer.ops.scaled import Scaled


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(rows: int, columns: int, seed: int = 1) -> Scaled[Tensor]:
    """Random numbers whose blocks are of very different sizes."""
    size = rand(-(-rows // 128), -(-columns // 128), seed=seed + 1).exp()
    size = size.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return scaled.quantized(rand(rows, columns, seed=seed) * size / columns**0.5)


@pytest.mark.parametrize(("rows", "columns"), [(3, 128), (2, 1296), (5, 112)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Numbers and scales are the reference's bit for bit: subnormal ones, zeros and single large ones, too."""
    x = rand(rows, columns) * rand(rows, columns, seed=1).exp() ** 3
    x[0, :64] = 0
    x[1, :128] = 0
    x[1, -1] = 1000
    x[0, 100] = 447.999 / 448
    got, scales = quantize(x.to(dtype))
    want, wanted = scaled.quantized_rows(x.to(dtype))
    assert torch.equal(scales, wanted.t())
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("rows", "n", "k"), [(2, 64, 128), (17, 200, 304), (33, 128, 144)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_any_shape_bias_and_gate(rows: int, n: int, k: int, bias: bool, gated: bool, rounded: bool) -> None:
    """Products equal the reference of their rounding, with tiles that do not divide the shape, bias and gate."""
    n = 128 * -(-n // 128) if gated else n
    x, w = rand(rows, k), weight(2 * n if gated else n, k)
    b = rand(len(w), seed=5) if bias else None
    want = (scaled.quantized_linear if rounded else scaled.scaled_linear)(x, w, b)
    want = norm.silu_and_mul(want) if gated else want
    tile = ScaledTile(16, 32, 2, 1, 1)
    got = scaled_gemm(x, w, torch.float32, bias=b, gated=gated, tile=tile, rounded=rounded)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("k", [640, 336, 64])
def test_parts_add_up(split: int, k: int) -> None:
    """Partial sums add up to the product, bias once, also where the parts do not divide the blocks of columns."""
    x, w, bias = rand(5, k), weight(40, k), rand(40, seed=2)
    out = torch.full((split, 5, 40), torch.nan)
    got = scaled_gemm(x, w, torch.float32, bias=bias, partial=True, out=out, tile=ScaledTile(16, 32, 2, 1, split))
    assert got is out
    torch.testing.assert_close(got.sum(0), scaled.scaled_linear(x, w, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [7, 65])
def test_who_is_rounded(rows: int) -> None:
    """Up to 64 rows keep their activations in half precision, more are rounded to 8 bits: errors of 1e-3 and 3e-2."""
    x, w = rand(rows, 256).half(), weight(128, 256)
    want = scaled.scaled_linear(x.float(), w)
    off = ((scaled_gemm(x, w, torch.float16).float() - want).norm(dim=-1) / want.norm(dim=-1)).max()
    assert off < 1e-3 if rows <= 64 else 1e-2 < off < 3.5e-2


@pytest.mark.parametrize("rows", [2, 16, 33, 64, 65, 8192])
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(2112, 7168, False), (24576, 1536, False), (18432, 7168, True), (7168, 2048, False)]
)
def test_tiles(rows: int, n: int, k: int, gated: bool) -> None:
    """Tiles fit the shared memory of a processor and blocks of scales; columns are split only for partial sums."""
    for partial in (False, True):
        t = scaled_tile(rows, n, k, gated, partial=partial)
        assert 128 * t.stages * (t.m * (1 if rows > 64 else 2) + t.n * (2 if gated else 1)) <= 220 * 1024
        assert 128 % t.n == 0
        assert partial or t.split == 1
        assert t.split == 1 or k >= 256 * t.split


def test_what_is_refused() -> None:
    """Rows that TMA can not read, and halves whose scales would share blocks."""
    with pytest.raises(InvalidSetting, match="fp8: native: rows of 100 numbers"):
        scaled_gemm(rand(2, 100), weight(128, 100), torch.float32)
    with pytest.raises(ValueError, match="gate and up of 64 rows"):
        scaled_gemm(rand(2, 128), weight(128, 128), torch.float32, gated=True)
