"""Root-mean-square norms and the gated activation. Float32 inside, output of the input's dtype. D model width, F gate
width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; rounded once, at the end.

    **Source**: Zhang and Sennrich 2019, equation 4.
    """
    wide = functional.rms_norm(x_TD.to(torch.float32), x_TD.shape[-1:], eps=eps)
    return wide.mul_(weight_D).to(x_TD.dtype)


def fused_add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and that sum (rounded to the residual's dtype before it is normed)."""
    total = residual_TD + x_TD
    return rms_norm(total, weight_D, eps), total


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up of `[.., 2F]`, gate first: `[.., F]`."""
    gate, up = gate_up_TF.to(torch.float32).chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(gate_up_TF.dtype)
