"""Embedding, residual and norm, gated activation, in Triton's interpreter, against the reference of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.ops import norm
from agentinfer.ops.kernels.add_norm import add_norm, fused_add_rms_norm, rms_norm
from agentinfer.ops.kernels.embed import embed
from agentinfer.ops.kernels.silu import silu_and_mul


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize("width", [64, 576])
def test_partial_sums_end_in_the_residual(parts: int, width: int) -> None:
    """Pending sums are added to the residual in place, in order, and the sum is normed."""
    residual, pending = rand(3, width), rand(parts, 3, width, seed=1) if parts else None
    weight = 1 + 0.2 * rand(width, seed=2)
    want = residual.clone()
    for part in () if pending is None else pending:
        want += part
    got = add_norm(residual, pending, weight, 1e-6, torch.float32)
    assert torch.equal(residual, want)
    torch.testing.assert_close(got, norm.rms_norm(want, weight, 1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[2, 0], [], [1, 1, 3]])
def test_chosen_rows_leave_the_residual(rows: list[int]) -> None:
    """Of chosen rows the norm of residual plus pending comes back, and the residual stays what it was."""
    residual, pending, weight = rand(4, 192), rand(2, 4, 192, seed=1), 1 + 0.2 * rand(192, seed=2)
    before = residual.clone()
    got = add_norm(residual, pending, weight, 1e-6, torch.float16, rows=torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(residual, before)
    assert got.dtype == torch.float16
    want = norm.rms_norm(before + pending.sum(0), weight, 1e-6)[rows]
    torch.testing.assert_close(got.float(), want, rtol=1e-3, atol=1e-3)


def test_primitives_are_the_reference() -> None:
    """rms_norm, also of heads, and fused_add_rms_norm equal the reference and write no argument."""
    x, residual, weight = rand(3, 2, 80), rand(3, 2, 80, seed=1), 1 + 0.2 * rand(80, seed=2)
    before = residual.clone()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-5)
    for got, want in zip(
        fused_add_rms_norm(x, residual, weight, 1e-6), norm.fused_add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("shape", [(3, 128), (2, 2, 2 * 1100), (0, 64)])
def test_silu_and_mul(shape: tuple[int, ...]) -> None:
    """silu_and_mul equals the reference for any leading shape and width."""
    x = rand(*shape)
    torch.testing.assert_close(silu_and_mul(x), norm.silu_and_mul(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [48, 576, 1100])
def test_embed(width: int) -> None:
    """Rows of the table arrive exactly, as float32."""
    table, ids = rand(11, width).half(), torch.tensor([3, 10, 0, 3])
    assert torch.equal(embed(ids, table), table.float()[ids])
