"""Weights of 8 bits with a float32 scale for each block of 128 x 128, and products with them: the torch reference.

The blocks at the right and the lower edge may be smaller. A product has one of two roundings:

=================== ============================================== ===========================================
                    activations                                    relative error beside exact products
=================== ============================================== ===========================================
`scaled_linear`     as they are                                    that of their dtype (2e-3 in bfloat16)
`quantized_linear`  8 bits, one scale a row and 128 columns        3e-2 a product: 3 bits of mantissa are left
=================== ============================================== ===========================================

Either way the weights are what is stored times its scale, never rounded again, and sums are float32.

Shapes: T rows, N outputs, K columns.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

A = TypeVar("A")

BLOCK: Final = 128
"""Rows and columns of a block."""
FLOAT8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""Of what FLOAT8 can hold."""
LEAST: Final = 1e-10
"""What the largest number of a row's block is taken for, where it is less: blocks may be all zero."""


@frozen(eq=False)
class Scaled(Generic[A]):
    """A weight of 8 bits; in a tree of weights a record like any other, with two leaves."""

    stored: A
    """[.., N, K] float8_e4m3fn."""
    scales: A
    """[.., ceil(N / 128), ceil(K / 128)] float32: what the blocks are to be multiplied by."""

    @property
    def shape(self: Scaled[Tensor]) -> torch.Size:
        """Of what is stored."""
        return self.stored.shape

    def __len__(self: Scaled[Tensor]) -> int:
        return len(self.stored)

    def __getitem__(self: Scaled[Tensor], i: int) -> Scaled[Tensor]:
        """One of several weights."""
        return Scaled(self.stored[i], self.scales[i])


Weight = Tensor | Scaled[Tensor]


def stacked(w: Weight, rows: int) -> Weight:
    """[E * rows, K] as [E, rows, K]: views. Of 8 bits, *rows* are a multiple of 128, or all."""
    if isinstance(w, Tensor):
        return w.view(-1, rows, w.shape[1])
    scales = w.scales.view(-1, -(-rows // BLOCK), w.scales.shape[1])
    return Scaled(w.stored.view(-1, rows, w.stored.shape[1]), scales)


def dequantized(stored: Tensor, scales: Tensor, first: tuple[int, ...] = (0, 0)) -> Tensor:
    """A part of a weight in float32. *stored* begins at row and column *first* of the whole; *scales* are those of the
    blocks that cover it.
    """
    out = stored.to(torch.float32)
    for axis, start in enumerate(first):
        block = torch.arange(start, start + stored.shape[axis], device=stored.device) // BLOCK - start // BLOCK
        scales = scales.index_select(axis, block)
    return out.mul_(scales.to(torch.float32))


def quantized(weight: Tensor) -> Scaled[Tensor]:
    """[N, K] of any floating dtype in 8 bits: the largest number of a block becomes 448."""
    rows, columns = weight.shape
    wide = functional.pad(weight.to(torch.float32), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = wide.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(LEAST) / LARGEST
    stored = (blocks / scales[:, None, :, None]).view(wide.shape)
    return Scaled(stored[:rows, :columns].to(FLOAT8).contiguous(), scales)


def quantized_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Activations in 8 bits, and their scales [T, ceil(K / 128)] float32: the largest of 128 columns becomes 448."""
    rows, columns = x_TK.shape
    groups = functional.pad(x_TK.to(torch.float32), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    # Divided by a tensor: a GPU would multiply by the reciprocal of a number, and round otherwise than a CPU.
    scales = groups.abs().amax(-1).clamp_min(LEAST) / groups.new_full((), LARGEST)
    return (groups / scales.unsqueeze(-1)).flatten(1)[:, :columns].to(FLOAT8).contiguous(), scales


def scaled_linear(x_TK: Tensor, weight: Scaled[Tensor], bias_N: Tensor | None = None) -> Tensor:
    """x @ weight^T (+ bias), [T, N] of x's dtype. Weights and sums are float32, x is as it is."""
    wide = None if bias_N is None else bias_N.to(torch.float32)
    weight_NK = dequantized(weight.stored, weight.scales)
    return functional.linear(x_TK.to(torch.float32), weight_NK, wide).to(x_TK.dtype)


def quantized_linear(x_TK: Tensor, weight: Scaled[Tensor], bias_N: Tensor | None = None) -> Tensor:
    """`scaled_linear` of what becomes of *x* in 8 bits: what kernels of many rows compute."""
    stored, scales = quantized_rows(x_TK)
    wide = stored.to(torch.float32) * scales.repeat_interleave(BLOCK, 1)[:, : x_TK.shape[1]]
    return scaled_linear(wide, weight, bias_N).to(x_TK.dtype)
