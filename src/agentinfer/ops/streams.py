"""The residual stream between our own kernels: what is pending, and the norm.

Shapes: T positions, D model width, P partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentinfer.ops.comm import Group
from agentinfer.ops.kernels.add_norm import add_norm
from agentinfer.ops.provide import Stream


def over_ranks(residual_TD: Tensor, parts_PTD: Tensor, dtype: torch.dtype, group: Group) -> Stream:
    """The stream to which the sum over *group* of the sum of *parts* is to be added, rounded to *dtype* if there are
    several ranks. Where one kernel can sum over them, add and norm, that is left to the next norm.
    """
    if group.size == 1:
        return Stream(residual_TD, parts_PTD)
    rows, width = residual_TD.shape
    left = Stream(residual_TD, parts_PTD, group)
    return left if group.sums_and_norms(rows, width, dtype) is not None else summed(left, dtype)


def summed(stream: Stream, dtype: torch.dtype) -> Stream:
    """*stream* with what is pending summed over the ranks that it has still to be."""
    residual, parts, group = stream
    if group is None or parts is None:
        return stream
    own = parts[0] if len(parts) == 1 else parts.sum(0, dtype=torch.float32)
    return Stream(residual, group.all_reduce_sum(own.to(dtype)).unsqueeze(0))


def added(stream: Stream, dtype: torch.dtype) -> Tensor:
    """The residual with all that is pending; the stream's own if nothing is."""
    residual, parts, _ = summed(stream, dtype)
    return residual if parts is None else residual + parts.sum(0, dtype=residual.dtype)


def norm(stream: Stream, norm_D: Tensor, dtype: torch.dtype, eps: float, *, pdl: bool) -> tuple[Tensor, Stream]:
    """The norm of the residual with what is pending, in *dtype*, and the stream with that added to it, in place."""
    residual, parts, group = stream
    if group is not None and parts is not None:
        rows, width = residual.shape
        peers = group.sums_and_norms(rows, width, dtype)
        if peers is not None:
            return peers.add_norm(parts, residual, norm_D, eps, dtype), Stream(residual, None)
        stream = summed(stream, dtype)
    normed = add_norm(residual, stream.pending_TD, norm_D, eps, dtype, pdl=pdl)
    return normed, Stream(residual, None)
