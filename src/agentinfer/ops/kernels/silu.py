"""The gated activation. T positions, F gate width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct

WIDTH = 1024
"""Numbers a program."""


@triton.jit
def _silu_and_mul(x, out, F: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr):
    """Program (t, f): numbers f * BF and on of position t."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = at < F
    if PDL:
        gdc_wait()
    gate = tl.load(x + row * (2 * F) + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(x + row * (2 * F) + F + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + row * F + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


_run = Direct(_silu_and_mul)


def silu_and_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up of `[.., 2F]`, contiguous, gate first: `[.., F]` of its dtype. Float32 inside."""
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    count = out.numel() // width
    if count:
        _run((count, -(-width // WIDTH), 1), (gate_up, out), (), (width, WIDTH, pdl), warps=4, pdl=pdl)
    return out
