"""Routing and experts by our Triton kernels. Nothing here depends on a route on the host, so graphs can capture it.

=========== ==================================================================================================
positions   experts
=========== ==================================================================================================
1           `route_one`, `expert_gemv`: the shared experts are some more, the sum goes onto the residual
more        norm, logits and choice, `expert_rows`, then `expert_gemm`: the K parts of a position stay pending,
            those of the shared ones behind
=========== ==================================================================================================

Weights of 8 bits: `scaled_experts` in place of `expert_gemm`, for one position, too.

Shapes: T positions, D model width, E experts, K experts a position, F width of an expert, G of the shared ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentinfer.errors import InvalidSetting
from agentinfer.ops import moe
from agentinfer.ops.comm import Group
from agentinfer.ops.kernels.expert_gemm import expert_gemm, expert_tile
from agentinfer.ops.kernels.expert_gemv import expert_gemv
from agentinfer.ops.kernels.expert_rows import expert_rows
from agentinfer.ops.kernels.gemv import gemv
from agentinfer.ops.kernels.route import choose_experts, router_logits
from agentinfer.ops.kernels.route_one import route_one
from agentinfer.ops.kernels.scaled_experts import scaled_expert_tile, scaled_experts
from agentinfer.ops.moe import ExpertShape, Routing
from agentinfer.ops.products import Launch, by_gemm, gated, gemm, parts_of, product
from agentinfer.ops.provide import Matrix, Stream
from agentinfer.ops.streams import added, norm, over_ranks

ROUTER_ROWS = 256
"""Most rows for our own router product; beyond, cuBLAS in float32 is faster."""
WIDE_ROWS = 512
"""Most rows whose parts are kept in float32. Beyond they would take more memory than all else in the layer, so they are
rounded to the model's dtype, as the reference rounds them."""


def unsupported(shape: ExpertShape, itemsize: int) -> str | None:
    """Why the kernels have no program for these experts; None if they have."""
    if shape.width * itemsize % 16:
        return f"experts of width {shape.width}: rows are no multiple of 16 bytes"
    return None


def norm_route(
    run: Launch, stream: Stream, norm_D: Tensor, router_ED: Tensor, bias_E: Tensor | None, routing: Routing, eps: float
) -> tuple[Tensor, Tensor, Tensor, Stream]:
    """Ops.norm_route by our kernels. Of equal scores the expert of the lowest number is chosen."""
    residual = stream.residual_TD
    if len(residual) == 1 and stream.pending_TD is None:
        routed = route_one(residual, norm_D, router_ED, bias_E, routing, eps, run.counters, pdl=run.pdl)
        return *routed, stream
    normed, stream = norm(stream, norm_D, norm_D.dtype, eps, pdl=run.pdl)
    if len(residual) == 1:
        return *route_one(normed, None, router_ED, bias_E, routing, eps, run.counters, pdl=run.pdl), stream
    if len(normed) <= ROUTER_ROWS:
        logits = router_logits(normed, router_ED, pdl=run.pdl)
    else:
        logits = moe.router_logits(normed, router_ED)
    weights, experts = choose_experts(logits, bias_E, routing, pdl=run.pdl)
    return normed, weights, experts, stream


def experts_add(
    run: Launch, normed: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Matrix, down_EDF: Matrix,
    shared_gate_up: Matrix | None, shared_down: Matrix | None, stream: Stream, group: Group,
) -> Stream:  # fmt: skip
    """Ops.experts_add by our kernels: the sum is in a fixed order, shared ones first (one position) or last (more).

    Raises InvalidSetting if rows of the weights are no multiple of 16 bytes.
    """
    if (shared_gate_up is None) != (shared_down is None):
        raise ValueError("shared experts have two weights, or there are none; one is missing")
    residual = added(stream, normed.dtype)
    work = (normed, weights_TK, experts_TK, gate_up_EFD, down_EDF, shared_gate_up, shared_down)
    if len(normed) == 1 and isinstance(gate_up_EFD, Tensor):
        if group.size == 1:
            return Stream(_one(run, *work, residual, absent=False), None)
        parts = _one(run, *work, torch.zeros_like(residual), absent=True).unsqueeze(0)
    else:
        parts = _many(run, *work, absent=group.size > 1)
    return over_ranks(residual, parts, normed.dtype, group)


def _one(
    run: Launch, x_1D: Tensor, weights_1K: Tensor, experts_1K: Tensor, gate_up_EFD: Matrix, down_EDF: Matrix,
    shared_gate_up: Matrix | None, shared_down: Matrix | None, add_to: Tensor, *,
    absent: bool,
) -> Tensor:  # fmt: skip
    """All experts of one position onto *add_to* in place. *absent*: other ranks may have some, which are -1 here."""
    together = shared_down is None or shared_down.shape[1] % down_EDF.shape[2] == 0
    shared = (shared_gate_up, shared_down) if together else (None, None)
    out = expert_gemv(x_1D, weights_1K, experts_1K, gate_up_EFD, down_EDF, *shared, add_to, absent=absent, pdl=run.pdl)
    if not together and shared_gate_up is not None and shared_down is not None:
        act = gated(run, x_1D, shared_gate_up, None)
        out = gemv(act, shared_down, torch.float32, add_to=out, pdl=run.pdl)
    return out


def _many(
    run: Launch, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Matrix, down_EDF: Matrix,
    shared_gate_up: Matrix | None, shared_down: Matrix | None, *, absent: bool,
) -> Tensor:  # fmt: skip
    """[K + .., T, D]: parts whose sum is that of all experts of each position. *absent*: as in `_one`."""
    (count, model), chosen = x_TD.shape, experts_TK.shape[1]
    num_experts, _, width = down_EDF.shape
    for size in (model, width):
        if size * x_TD.dtype.itemsize % 16:
            raise InvalidSetting("ops", f"triton: experts whose rows of {size} are no multiple of 16 bytes")
    act, more = None, 0
    if shared_gate_up is not None and shared_down is not None:
        act, more = gated(run, x_TD, shared_gate_up, None), 1
        if by_gemm(run, act, shared_down):
            more = parts_of(act, shared_down)
    dtype = torch.float32 if count <= WIDE_ROWS else x_TD.dtype
    parts = torch.empty((chosen + more, count, model), dtype=dtype, device=x_TD.device)
    if absent:
        parts[:chosen].zero_()
    if not isinstance(gate_up_EFD, Tensor):
        small = scaled_expert_tile(count * chosen, num_experts)
        rows = expert_rows(experts_TK, num_experts, small.rows, pdl=run.pdl)
        scaled_experts(x_TD, weights_TK, rows, gate_up_EFD, down_EDF, parts[:chosen], pdl=run.pdl, tile=small)
    else:
        tile = expert_tile(count * chosen, num_experts, x_TD.dtype.itemsize)
        rows = expert_rows(experts_TK, num_experts, tile.rows, pdl=run.pdl)
        expert_gemm(x_TD, weights_TK, rows, gate_up_EFD, down_EDF, parts[:chosen], pdl=run.pdl, tile=tile)
    if act is not None and shared_down is not None:
        if by_gemm(run, act, shared_down):
            gemm(act, shared_down, dtype, partial=True, out=parts[chosen:], pdl=run.pdl)
        else:
            parts[chosen].copy_(product(run, act, shared_down, None))
    return parts
