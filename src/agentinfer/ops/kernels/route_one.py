"""Where one position goes, in one kernel: norm, the router's logits in float32, and the choice.

A program has one expert's logit; each norms the position for itself, and the last one to finish chooses.

Shapes: D model width, E experts, K experts of the position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.route import LEAST_SUM, constants_of, pick
from agentinfer.ops.kernels.tiles import power_of_two
from agentinfer.ops.moe import Routing


@triton.jit
def _route_one(
    x, norm, router, bias, normed, logits, weights, experts, counters, eps, scale, least,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e: expert e. NORM: x is normed first; the first program writes the norm, which all know."""
    if PDL:
        gdc_launch_dependents()
    e = tl.program_id(0)
    dims = tl.arange(0, BD)
    inside = dims < D
    w = tl.load(router + e * D + dims, mask=inside, other=0.0).to(tl.float32)
    n = w
    if NORM:
        n = tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    y = tl.load(x + dims, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        z = (y * tl.rsqrt(tl.sum(y * y) / D + eps) * n).to(normed.dtype.element_ty)
        if e == 0:
            tl.store(normed + dims, z, mask=inside)
        y = z.to(tl.float32)
    tl.store(logits + e, tl.sum(y * w))
    tl.debug_barrier()  # all threads have stored before one of them counts
    if tl.atomic_add(counters, 1, sem="acq_rel") == E - 1:
        tl.store(counters, 0)
        pick(
            logits, bias, weights, experts, 0, scale, least,
            E, K, GROUPS, KEPT, GP, PP, KP, SOFTMAX, NORMALISE, TOP2, BIAS, FIRST, HELD,
        )  # fmt: skip


_run = Direct(_route_one)


def route_one(
    x_1D: Tensor, norm_D: Tensor | None, router_ED: Tensor, bias_E: Tensor | None, r: Routing, eps: float,
    counters: Tensor, *, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm of one position, `router_logits` and `choose_experts`: (normed [1, D] of the norm's dtype, weights
    [1, K] float32, experts [1, K] int64). *norm*: None if *x* is normed already, which is then what is returned.

    *router* and *bias* are float32; all contiguous. *counters*: int32, the first of them 0 before and after; no other
    stream may use it meanwhile. *pdl*: all but *x* is complete before the kernel before this one began.
    """
    (experts, width), device = router_ED.shape, x_1D.device
    normed = x_1D if norm_D is None else torch.empty((1, width), dtype=norm_D.dtype, device=device)
    logits = torch.empty((1, experts), dtype=torch.float32, device=device)
    weights = torch.empty((1, r.top_k), dtype=torch.float32, device=device)
    chosen = torch.empty((1, r.top_k), dtype=torch.int64, device=device)
    block = power_of_two(width)
    _run(
        (experts, 1, 1),
        (x_1D, router_ED if norm_D is None else norm_D, router_ED, router_ED if bias_E is None else bias_E, normed,
         logits, weights, chosen, counters),
        (eps, r.scale, LEAST_SUM),
        (width, block, norm_D is not None, *constants_of(r, experts, bias=bias_E is not None), pdl),
        warps=4 if block <= 4096 else 8, pdl=pdl,
    )  # fmt: skip
    return normed, weights, chosen
