"""Products of rows and a weight by our own kernels or cuBLAS, by the number of rows: see `triton_ops`."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.kernels import silu
from agentinfer.ops.kernels.gemm import fits, gemm
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.tiles import NARROW


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


def by_gemm(run: Launch, x: Tensor, weight: Tensor) -> bool:
    """Whether our own product of several rows serves these."""
    most = run.narrow_rows if weight.numel() <= NARROW else run.gemm_rows
    return 1 < len(x) <= most and fits(x, weight)


def product(run: Launch, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias in x's dtype, for any number of rows."""
    if len(x) == 1:
        return gemv(x, weight, x.dtype, bias=bias, pdl=run.pdl)
    if by_gemm(run, x, weight):
        return gemm(x, weight, x.dtype, bias=bias, pdl=run.pdl)
    return functional.linear(x, weight, bias)


def gated(run: Launch, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of x @ weight^T + bias in x's dtype, for any number of rows; gate rows first."""
    if len(x) == 1:
        return gemv(x, weight, x.dtype, bias=bias, gated=True, pdl=run.pdl)
    if by_gemm(run, x, weight):
        return gemm(x, weight, x.dtype, bias=bias, gated=True, pdl=run.pdl)
    return silu.silu_and_mul(functional.linear(x, weight, bias), pdl=run.pdl)
