"""Matrix products against weights, whole or cut over ranks. T positions, D model width, X output, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from agentinfer.ops.comm import Group
from agentinfer.ops.scaled import Scaled, Weight, scaled_linear


def linear(x_TD: Tensor, weight_XD: Weight, bias_X: Tensor | None = None) -> Tensor:
    """x @ weight^T (+ bias), [T, X] of x's dtype. Accumulates in float32."""
    if isinstance(weight_XD, Scaled):
        return scaled_linear(x_TD, weight_XD, bias_X)
    return functional.linear(x_TD, weight_XD, bias_X)


def row_parallel(x_TD: Tensor, weight_XD: Weight, bias_X: Tensor | None, group: Group) -> Tensor:
    """`linear` with its input width cut over *group*: partial products are summed over the ranks, the bias added once
    after.
    """
    if group.size == 1:
        return linear(x_TD, weight_XD, bias_X)
    y = group.all_reduce_sum(linear(x_TD, weight_XD))
    return y if bias_X is None else y + bias_X


def embedding(ids_T: Tensor, weight_VD: Tensor, group: Group) -> Tensor:
    """Rows of a table whose *vocabulary* is cut over *group*: rank r holds ids [r * V, (r + 1) * V). [T, D]."""
    if group.size == 1:
        return functional.embedding(ids_T, weight_VD)
    local = ids_T - group.rank * weight_VD.shape[0]
    outside = (local < 0) | (local >= weight_VD.shape[0])
    mine = functional.embedding(local.masked_fill(outside, 0), weight_VD)
    return group.all_reduce_sum(mine.masked_fill_(outside.unsqueeze(-1), 0))


def head(x_SD: Tensor, weight_VD: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Logits of a vocabulary cut over *group*: [S, vocab_size] float32, gathered over ranks, padding rows cut off."""
    local = functional.linear(x_SD, weight_VD).to(torch.float32)
    return group.all_gather_last_dim(local)[:, :vocab_size]
