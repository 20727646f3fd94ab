"""Few rows times a weight, in Triton's interpreter, which reads descriptors too, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.ops import norm
from agentinfer.ops.kernels.gemm import fits, gemm
from agentinfer.ops.kernels.tiles import GEMM, GemmTile, gemm_tile


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "n", "k"), [(2, 64, 128), (17, 40, 200), (33, 32, 64)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_any_shape_bias_and_gate(rows: int, n: int, k: int, bias: bool, gated: bool) -> None:
    """Products equal the reference, with tiles that do not divide the shape, bias and gate."""
    x, weight = rand(rows, k), rand(2 * n if gated else n, k, seed=1) / 10
    b = rand(len(weight), seed=2) if bias else None
    want = torch.nn.functional.linear(x, weight, b)
    want = norm.silu_and_mul(want) if gated else want
    got = gemm(x, weight, torch.float32, bias=b, gated=gated, tile=GemmTile(16, 32, 64, 2, 1, 1))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("k", [256, 200, 64])
def test_parts_add_up(split: int, k: int) -> None:
    """Partial sums add up to the product, bias once, also where the parts do not divide the columns."""
    x, weight, bias = rand(5, k), rand(40, k, seed=1) / 10, rand(40, seed=2)
    got = gemm(x, weight, torch.float32, bias=bias, partial=True, tile=GemmTile(16, 32, 64, 2, 1, split))
    assert got.shape == (split, 5, 40)
    torch.testing.assert_close(got.sum(0), x @ weight.t() + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated"), [*GEMM, (2, 960, 576, False), (64, 576, 1536, False), (9, 49152, 576, False)]
)
def test_tiles_of_any_shape_fit(rows: int, n: int, k: int, gated: bool) -> None:
    """Every tile fits the shared memory of a processor, and columns are split only where parts are wanted."""
    for partial in (False, True):
        tile = gemm_tile(rows, n, k, gated, partial=partial)
        assert 2 * tile.stages * tile.k * (tile.m + tile.n * (2 if gated else 1)) <= 220 * 1024
        assert partial or tile.split == 1
        assert tile.split == 1 or k >= tile.k * tile.split


def test_what_tma_can_not_read() -> None:
    """float32, mixed dtypes, and rows or addresses off 16 bytes are found out."""
    half = rand(32, 64).half()
    assert fits(half, half)
    assert not fits(half.float(), half.float())
    assert not fits(half.bfloat16(), half)
    assert not fits(half[:, :60], half[:, :60])
    assert not fits(half, half.view(-1)[4:].view(-1)[: 31 * 64].view(31, 64))
