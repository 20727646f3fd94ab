"""Norms, the gated activation and matrix products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.ops import linear as linears
from agentinfer.ops import norm
from agentinfer.ops.comm import Group, alone
from agentinfer.ops.threads import Threads

SHAPES = [(1, 8), (5, 48), (3, 2, 16)]


def ulps(actual: Tensor, exact: Tensor) -> float:
    """The largest distance of bf16 *actual* from the bf16 rounding of *exact*, in units of the last place."""
    want = exact.to(torch.bfloat16)
    spacing = torch.exp2(torch.floor(torch.log2(want.double().abs().clamp_min(1e-30))) - 7)
    return ((actual.double() - want.double()).abs() / spacing).max().item()


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_formula(shape: tuple[int, ...]) -> None:
    """float32 within 1e-5 of the formula in float64, bf16 within one unit in the last place; the dtype is kept."""
    gen = torch.Generator().manual_seed(1)
    x, w = torch.randn(shape, generator=gen), torch.randn(shape[-1], generator=gen)
    torch.testing.assert_close(norm.rms_norm(x, w, 1e-6), naive_norm(x, w, 1e-6).float(), rtol=1e-5, atol=1e-5)
    xb, wb = x.bfloat16(), w.bfloat16()
    y = norm.rms_norm(xb, wb, 1e-6)
    assert y.dtype == torch.bfloat16
    assert ulps(y, naive_norm(xb, wb, 1e-6)) <= 1


def test_rms_norm_takes_any_strides() -> None:
    """A transposed or sliced input gives what its contiguous copy gives."""
    x, w = torch.randn(6, 10), torch.randn(6)
    for view in (x.t(), torch.randn(4, 24)[:, ::4]):
        torch.testing.assert_close(norm.rms_norm(view, w, 1e-6), norm.rms_norm(view.contiguous(), w, 1e-6))


def test_eps_is_inside_the_root() -> None:
    """A row of zeros gives zeros, and a small row is held down by eps."""
    assert not norm.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6).any()
    torch.testing.assert_close(
        norm.rms_norm(torch.full((1, 4), 1e-3), torch.ones(4), 1e-6), torch.full((1, 4), 0.5**0.5)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_add_norms_the_rounded_sum(dtype: torch.dtype) -> None:
    """It returns rms_norm(residual + x) and that sum, and leaves its arguments as they were."""
    x, r, w = (torch.randn(5, 8).to(dtype), torch.randn(5, 8).to(dtype), torch.randn(8).to(dtype))
    before = x.clone(), r.clone()
    y, total = norm.fused_add_rms_norm(x, r, w, 1e-5)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(y, norm.rms_norm(total, w, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(r, before[1])


def test_silu_and_mul_takes_the_gate_first() -> None:
    """silu of the first half times the second; bf16 within one unit in the last place."""
    x = torch.randn(4, 10)
    exact = x[:, :5].double() * torch.sigmoid(x[:, :5].double()) * x[:, 5:].double()
    torch.testing.assert_close(norm.silu_and_mul(x), exact.float(), rtol=1e-5, atol=1e-5)
    xb = x.bfloat16()
    exact = xb[:, :5].double() * torch.sigmoid(xb[:, :5].double()) * xb[:, 5:].double()
    assert ulps(norm.silu_and_mul(xb), exact) <= 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_adds_the_bias_once(size: int) -> None:
    """The input width cut over the ranks gives the whole product, with one bias."""
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    want = x @ w.t() + b

    def work(group: Group) -> Tensor:
        part = slice(group.rank * 8 // size, (group.rank + 1) * 8 // size)
        return linears.row_parallel(x[:, part], w[:, part], b, group)

    for y in Threads.of(size).run(work):
        torch.testing.assert_close(y, want)
    torch.testing.assert_close(linears.row_parallel(x, w, None, alone().tp), x @ w.t())
    torch.testing.assert_close(linears.linear(x, w, b), want)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_vocabulary_parallel_embedding_and_head(size: int) -> None:
    """A vocabulary of 7 padded to the ranks embeds as the whole table does, and no padding row ever shows in the
    logits.
    """
    table = torch.randn(7, 4)
    width = -(-7 // size)
    padded = torch.cat((table, torch.full((width * size - 7, 4), 1e4)))
    ids = torch.tensor([0, 6, 3, 3, 5])

    def work(group: Group) -> tuple[Tensor, Tensor]:
        shard = padded[group.rank * width : (group.rank + 1) * width]
        x = linears.embedding(ids, shard, group)
        return x, linears.head(x.bfloat16(), shard.bfloat16(), group, 7)

    for x, logits in Threads.of(size).run(work):
        assert torch.equal(x, table[ids])
        assert logits.shape == (5, 7)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, table[ids] @ table.t(), rtol=3e-2, atol=3e-2)
