"""Products of rows and a weight by our own kernels or cuBLAS, by the number of rows: see `triton_ops`."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.kernels import gemm as wide
from agentinfer.ops.kernels import silu
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.scaled_gemm import EXACT_ROWS, scaled_gemm, scaled_tile
from agentinfer.ops.kernels.tiles import NARROW, gemm_tile
from agentinfer.ops.scaled import Scaled, Weight


@frozen(eq=False)
class Launch:
    """What every call of Triton's ops needs besides its arguments."""

    pdl: bool
    """Programmatic dependent launch."""
    gemm_rows: int
    """Most rows for our own product of several rows."""
    narrow_rows: int
    """The same of weights of at most NARROW numbers: there it counts that a kernel begins before the one before it has
    ended, which those of cuBLAS do not.
    """
    counters: Tensor
    """[COUNTERS] int32, 0 between kernels: see `attend_decode`."""


def by_gemm(run: Launch, x: Tensor, weight: Weight) -> bool:
    """Whether `gemm`, whose partial sums may be left to others, serves these."""
    if isinstance(weight, Scaled):
        return 1 < len(x) <= EXACT_ROWS
    most = run.narrow_rows if weight.numel() <= NARROW else run.gemm_rows
    return 1 < len(x) <= most and wide.fits(x, weight)


def gemm(
    x: Tensor, weight: Weight, dtype: torch.dtype, *, bias: Tensor | None = None, gated: bool = False,
    partial: bool = False, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Our own product of several rows, as the kernels' `gemm` and `scaled_gemm`."""
    if isinstance(weight, Scaled):
        return scaled_gemm(x, weight, dtype, bias=bias, gated=gated, partial=partial, out=out, pdl=pdl)
    return wide.gemm(x, weight, dtype, bias=bias, gated=gated, partial=partial, out=out, pdl=pdl)


def parts_of(x: Tensor, weight: Weight) -> int:
    """In how many parts `gemm` gives partial sums of these."""
    tile = scaled_tile if isinstance(weight, Scaled) else gemm_tile
    return tile(len(x), weight.shape[0], x.shape[1], False, partial=True).split  # noqa: FBT003 - gated


def product(run: Launch, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias in x's dtype, for any number of rows."""
    if len(x) == 1:
        return gemv(x, weight, x.dtype, bias=bias, pdl=run.pdl)
    if isinstance(weight, Scaled) or by_gemm(run, x, weight):
        return gemm(x, weight, x.dtype, bias=bias, pdl=run.pdl)
    return functional.linear(x, weight, bias)


def gated(run: Launch, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of x @ weight^T + bias in x's dtype, for any number of rows; gate rows first."""
    if len(x) == 1:
        return gemv(x, weight, x.dtype, bias=bias, gated=True, pdl=run.pdl)
    if isinstance(weight, Scaled) or by_gemm(run, x, weight):
        return gemm(x, weight, x.dtype, bias=bias, gated=True, pdl=run.pdl)
    return silu.silu_and_mul(functional.linear(x, weight, bias), pdl=run.pdl)
