"""Rows of the embedding, as the float32 residual stream: the first kernel of a step.

It is launched without the attribute of programmatic dependent launch, so it begins when all before it is complete; and
it lets the next kernel begin at once. So whatever was complete before the step may be read early by every kernel in
it: inputs, tables, the KV of earlier steps.

Shapes: T positions, V vocabulary, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from agentinfer.ops.kernels.launch import Direct

WIDTH = 1024
"""Numbers a program."""


@triton.jit
def _embed(ids, weight, out, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """Program (t, d): numbers d * BD and on of position t."""
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0)
    dims = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = dims < D
    row = tl.load(ids + at).to(tl.int64)
    x = tl.load(weight + row * D + dims, mask=inside, other=0.0)
    tl.store(out + at.to(tl.int64) * D + dims, x.to(tl.float32), mask=inside)


_run = Direct(_embed)


def embed(ids_T: Tensor, weight_VD: Tensor, *, pdl: bool = False) -> Tensor:
    """Rows *ids* (int64) of the table: [T, D] float32."""
    width = weight_VD.shape[1]
    out = torch.empty((len(ids_T), width), dtype=torch.float32, device=ids_T.device)
    if len(ids_T):
        block = min(WIDTH, triton.next_power_of_2(width))
        _run((len(ids_T), -(-width // block), 1), (ids_T, weight_VD, out), (), (width, block, pdl), warps=4)
    return out
