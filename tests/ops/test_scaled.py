"""Weights of 8 bits: what they stand for, what a product of them is, and how far rounded activations are off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentinfer.ops import moe, scaled
from agentinfer.ops.comm import alone
from agentinfer.ops.linear import linear, row_parallel
from agentinfer.ops.scaled import Scaled
from deepseeks import in_8_bits, out_of_8_bits

RAGGED = [(128, 256), (200, 300), (1, 128), (130, 7)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(rows: int, columns: int, seed: int = 0) -> tuple[Scaled[Tensor], Tensor]:
    """(in 8 bits, what it stands for); blocks are of very different sizes."""
    size = rand(-(-rows // 128), -(-columns // 128), seed=seed + 1).exp()
    x = rand(rows, columns, seed=seed) * size.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    stored, scales = in_8_bits(x)
    return Scaled(stored, scales), out_of_8_bits(stored, scales)


@pytest.mark.parametrize(("rows", "columns"), RAGGED)
def test_rounding_a_weight(rows: int, columns: int) -> None:
    """What is made of a weight is what was written down plainly, block by block, and zero blocks stay zero."""
    x = rand(rows, columns)
    x[:128, :128] *= 0
    got = scaled.quantized(x)
    assert torch.equal(scaled.dequantized(got.stored, got.scales)[:128, :128], x[:128, :128])
    want, scales = in_8_bits(x[:, 128:] if columns > 128 else rand(1, 1))
    if columns > 128:
        assert torch.equal(got.stored[:, 128:].float(), want.float())
        assert torch.equal(got.scales[:, 1:], scales)


@pytest.mark.parametrize(("rows", "columns"), RAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(rows: int, columns: int, dtype: torch.dtype) -> None:
    """A product is that of the numbers that are stood for, rounded once; a part that is cut over ranks, too."""
    w, wide = weight(rows, columns)
    x, bias = rand(5, columns, seed=3).to(dtype), rand(rows, seed=4)
    want = (x.float() @ wide.T + bias).to(dtype)
    assert torch.equal(linear(x, w, bias), torch.nn.functional.linear(x.float(), wide, bias).to(dtype))
    torch.testing.assert_close(row_parallel(x, w, bias, alone().tp), want)


@pytest.mark.parametrize("columns", [7168, 300])
def test_rounded_activations(columns: int) -> None:
    """Rounded to 8 bits, each 128 columns by their largest number, activations are 3e-2 off, and never zero scales."""
    w, wide = weight(256, columns)
    x = rand(9, columns, seed=3) * rand(9, 1, seed=4).exp()
    x[0] = 0
    x[1, :128] *= 1000
    stored, scales = scaled.quantized_rows(x)
    assert scales.shape == (9, -(-columns // 128))
    back = stored.float() * scales.repeat_interleave(128, 1)[:, :columns]
    assert ((back - x).abs() <= x.abs() / 16 + scales.repeat_interleave(128, 1)[:, :columns] / 512).all()
    assert float(stored[1, :128].float().abs().max()) == 448
    want, got = x @ wide.T, scaled.quantized_linear(x, w)
    assert not got[0].any()
    off = ((got - want)[1:].norm(dim=-1) / want[1:].norm(dim=-1)).max()
    assert 1e-3 < off < 3.5e-2


def test_experts() -> None:
    """Experts in 8 bits are those of the numbers that they stand for."""
    gate_up, down = ([weight(*shape, seed=9 * i) for i in range(3)] for shape in ((256, 130), (130, 128)))
    x, weights, chosen = rand(6, 130), rand(6, 2).abs(), torch.tensor([[0, 1], [2, 1], [0, 2]] * 2)
    packed = [
        scaled.stacked(Scaled(torch.cat([w.stored for w, _ in ws]), torch.cat([w.scales for w, _ in ws])), rows)
        for ws, rows in ((gate_up, 256), (down[:1], 130))
    ]
    assert packed[1].shape == (1, 130, 128)
    downs = Scaled(torch.stack([w.stored for w, _ in down]), torch.stack([w.scales for w, _ in down]))
    got = moe.experts(x, weights, chosen, packed[0], downs)
    want = moe.experts(x, weights, chosen, *(torch.stack([wide for _, wide in ws]) for ws in (gate_up, down)))
    assert torch.equal(got, want)
