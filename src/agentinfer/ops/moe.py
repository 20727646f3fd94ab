"""Mixture of experts: which experts a token goes to, with which weights, and their loop. The torch reference.

All that decides a route is float32, for near ties are common: logits, scores, choice and weights.

Shapes: T positions, D model width, E experts, K experts a token, F local width of an expert.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.linear import linear
from agentinfer.ops.norm import silu_and_mul
from agentinfer.ops.scaled import Weight

_LEAST_SUM = 1e-20  # added to the sum that weights are divided by: scores of a sigmoid may all be 0


@frozen
class ExpertShape:
    """The routed experts of a layer, as one rank has them."""

    num_experts: int
    top_k: int
    """Experts a token."""
    width: int
    """Local, of one expert."""


@frozen
class Routing:
    """How a router chooses."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normalise: bool
    """Weights are divided by their sum."""
    scale: float = 1.0
    """Then multiplied by this."""
    groups: int = 1
    """Experts lie in as many groups, neighbours together.."""
    kept_groups: int = 1
    """.. and only those of the best groups can be chosen."""
    group_score: Literal["max", "top2"] = "max"
    """Of a group: its best score, or the sum of its two best."""
    first: int = 0
    """The experts that this rank has are numbered from this one on.."""
    held: int | None = None
    """.. and so many; None: all. Every other one is -1 in what is chosen."""


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x @ weight^T, [T, E] float32, never rounded to less."""
    return functional.linear(x_TD.to(torch.float32), weight_ED.to(torch.float32))


def route(logits_TE: Tensor, bias_E: Tensor | None, r: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each position, and what their outputs are multiplied by: weights [T, K] float32, experts [T, K]
    int64, those that this rank has distinct in a row, in no order.

    *bias* is added to the scores for the choice alone; weights are scores without it.

    **Source**: MoEGate of the DeepSeek-V2 and DeepSeek-V3 modeling files; DeepSeek-V3 report, equations 12 to 16.
    """
    logits = logits_TE.to(torch.float32)
    scores = logits.softmax(-1) if r.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias_E is None else scores + bias_E
    if r.kept_groups < r.groups:
        choice = _best_groups(choice, r)
    experts = choice.topk(r.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if r.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return weights * r.scale, _numbered_here(experts, r)


def _numbered_here(experts_TK: Tensor, r: Routing) -> Tensor:
    if r.held is None:
        return experts_TK
    local = experts_TK - r.first
    return local.masked_fill((local < 0) | (local >= r.held), -1)


def _best_groups(choice_TE: Tensor, r: Routing) -> Tensor:
    """*choice* with -inf for the experts of all but the best groups: with 0 one of those would beat a negative score,
    which a negative bias can make.
    """
    grouped = choice_TE.view(len(choice_TE), r.groups, choice_TE.shape[1] // r.groups)
    score = grouped.amax(-1) if r.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = score.topk(r.kept_groups, dim=-1).indices
    hidden = torch.ones_like(score, dtype=torch.bool).scatter_(1, kept, value=False)
    return grouped.masked_fill(hidden.unsqueeze(-1), -math.inf).flatten(1)


def experts(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Weight, down_EDF: Weight
) -> Tensor:  # fmt: skip
    """The weighted sum of each position's experts, [T, D] float32. No position is dropped. -1 is nobody: another rank
    has it.

    *gate_up* is [E, 2F, D], gate rows first; *down* [E, D, F]. Products are of x's dtype and accumulate in float32, as
    dense ones; the sum is float32, in the order of the experts' numbers, so that a position's result does not depend
    on its neighbours. Reads the routes on the host, so not for captured graphs.
    """
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    chosen, order = experts_TK.flatten().sort(stable=True)
    top_k = experts_TK.shape[1]
    rows, scale = torch.div(order, top_k, rounding_mode="floor"), weights_TK.flatten().index_select(0, order)
    first, *counts = cast("list[int]", torch.bincount(chosen + 1, minlength=len(gate_up_EFD) + 1).tolist())
    for expert, count in enumerate(counts):
        if not count:
            continue
        span = slice(first, first + count)
        act = silu_and_mul(linear(x_TD.index_select(0, rows[span]), gate_up_EFD[expert]))
        y = linear(act, down_EDF[expert]).to(torch.float32)
        out.index_add_(0, rows[span], y * scale[span].unsqueeze(-1))
        first += count
    return out
