"""Which experts a position goes to: the router's logits in float32, and the choice by every rule of `moe.Routing`.

Logits are summed in one order whatever the number of rows, so a route does not depend on its neighbours.

Shapes: T positions, D model width, E experts, K experts a position, G groups of E / G experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from agentinfer.ops.kernels.launch import Direct
from agentinfer.ops.kernels.tiles import power_of_two
from agentinfer.ops.moe import Routing

LEAST_SUM = 1e-20  # as in moe.route


@triton.jit(do_not_specialize=["T"])
def _logits(
    x, router, out, T,
    E: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (e, t): experts e * BE and on of positions t * BT and on."""
    if PDL:
        gdc_launch_dependents()
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    d = tl.arange(0, BD)
    at = router + tl.minimum(e, E - 1)[:, None] * D
    w = tl.load(at + d[None, :], mask=(d < D)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BT, BE, BD), tl.float32)
    for c in tl.static_range((D + BD - 1) // BD):
        col = c * BD + d
        if c > 0:
            w = tl.load(at + col[None, :], mask=(col < D)[None, :], other=0.0)
        there = (t < T)[:, None] & (col < D)[None, :]
        rows = tl.load(x + t[:, None] * D + col[None, :], mask=there, other=0.0, cache_modifier=".cg")
        acc += rows.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    there = (t < T)[:, None] & (e < E)[None, :]
    tl.store(out + t[:, None] * E + e[None, :], tl.sum(acc, 2), mask=there)


@triton.jit
def pick(  # noqa: ANN201 - kernels have no types
    logits, bias, weights, experts, t, scale, least,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Choose for position *t*. GP x PP: groups and experts a group, padded. Of equal ones the lowest number is
    chosen.
    """
    SIZE: tl.constexpr = E // GROUPS
    NONE: tl.constexpr = float("-inf")
    LOWEST: tl.constexpr = -3.4e38  # less than any score, more than what can not be chosen
    group = tl.arange(0, GP)[:, None]
    i = tl.arange(0, PP)[None, :]
    number = group * SIZE + i
    real = (group < GROUPS) & (i < SIZE)
    x = tl.load(logits + t * E + number, mask=real, other=NONE, cache_modifier=".cg")
    if SOFTMAX:
        y = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = y / tl.sum(tl.sum(y, 1), 0)
    else:
        score = 1.0 / (1.0 + tl.exp(-x))
    choice = score
    if BIAS:
        choice += tl.load(bias + number, mask=real, other=0.0)
    choice = tl.where(real, tl.where(choice > LOWEST, choice, LOWEST), NONE)  # NaN is chosen last
    if KEPT < GROUPS:
        best = tl.max(choice, 1)
        if TOP2:
            where = tl.argmax(choice, 1)
            best += tl.max(tl.where(i == where[:, None], NONE, choice), 1)
        each = tl.arange(0, GP)
        best = tl.where(each < GROUPS, tl.maximum(best, LOWEST), NONE)
        kept = each < 0
        for _ in tl.static_range(KEPT):
            one = each == tl.argmax(tl.where(kept, NONE, best), 0)
            kept = kept | one
        choice = tl.where(kept[:, None] | (choice == NONE), choice, LOWEST)
    choice = tl.reshape(choice, (GP * PP,))
    score = tl.reshape(score, (GP * PP,))
    at = tl.arange(0, GP * PP)
    k = tl.arange(0, KP)
    mine = tl.zeros((KP,), tl.float32)
    who = tl.zeros((KP,), tl.int32)
    for n in tl.static_range(K):
        one = tl.argmax(choice, 0)
        value = tl.sum(tl.where(at == one, score, 0.0), 0)
        mine = tl.where(k == n, value, mine)
        who = tl.where(k == n, one // PP * SIZE + one % PP, who)
        choice = tl.where(at == one, NONE, choice)
    if NORMALISE:
        mine = mine / (tl.sum(mine, 0) + least)
    tl.store(weights + t * K + k, mine * scale, mask=k < K)
    who -= FIRST
    who = tl.where((who >= 0) & (who < HELD), who, -1)
    tl.store(experts + t * K + k, who.to(tl.int64), mask=k < K)


@triton.jit
def _choose(
    logits, bias, weights, experts, scale, least,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: position t."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pick(
        logits, bias, weights, experts, tl.program_id(0).to(tl.int64), scale, least,
        E, K, GROUPS, KEPT, GP, PP, KP, SOFTMAX, NORMALISE, TOP2, BIAS, FIRST, HELD,
    )  # fmt: skip


_run_logits = Direct(_logits)
_run_choose = Direct(_choose)


def router_logits(x_TD: Tensor, router_ED: Tensor, *, pdl: bool = False) -> Tensor:
    """x @ router^T, [T, E] float32, summed in float32; both contiguous. For up to some hundred rows. *pdl*: the router
    is complete before the kernel before this one began.
    """
    count, (experts, width) = len(x_TD), router_ED.shape
    out = torch.empty((count, experts), dtype=torch.float32, device=x_TD.device)
    if count:
        rows = 1 if count == 1 else 4
        chunk = min(1024, power_of_two(width))
        _run_logits(
            (-(-experts // 4), -(-count // rows), 1), (x_TD, router_ED, out), (count,),
            (experts, width, rows, 4, chunk, pdl),
            warps=4, pdl=pdl,
        )  # fmt: skip
    return out


def constants_of(r: Routing, experts: int, *, bias: bool) -> tuple[int | bool, ...]:
    """The constants of `pick`, for a router of *experts* experts."""
    groups = r.groups if r.kept_groups < r.groups else 1
    return (
        experts, r.top_k, groups, r.kept_groups if groups > 1 else 1, power_of_two(groups),
        power_of_two(experts // groups), power_of_two(r.top_k), r.scoring == "softmax", r.normalise,
        r.group_score == "top2", bias, r.first, experts if r.held is None else r.held,
    )  # fmt: skip


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, r: Routing, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`moe.route`, the best expert first: weights [T, K] float32, experts [T, K] int64, distinct and in range (or -1,
    where other ranks have some) whatever the logits are (NaN, infinite). *logits* and *bias* are float32, contiguous.
    """
    count, experts = logits_TE.shape
    device = logits_TE.device
    weights = torch.empty((count, r.top_k), dtype=torch.float32, device=device)
    chosen = torch.empty((count, r.top_k), dtype=torch.int64, device=device)
    if count:
        _run_choose(
            (count, 1, 1), (logits_TE, logits_TE if bias_E is None else bias_E, weights, chosen), (r.scale, LEAST_SUM),
            (*constants_of(r, experts, bias=bias_E is not None), pdl), warps=1, pdl=pdl,
        )  # fmt: skip
    return weights, chosen
