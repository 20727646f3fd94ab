"""How likely tokens were: log-probability, rank and the likeliest tokens of each row of logits, without waiting.

The reference and, on a GPU too, the only way. All of it is computed on the logits' device in float32 and comes to the
host in one block. S rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from agentinfer.ops.inputs import put
from agentinfer.ops.sample import GREEDY_BELOW, TIE
from agentinfer.state.ids import F32, I32, ints
from agentinfer.state.logprobs import TokenLogprobs

MOST_AT_ONCE: Final = 1 << 24
"""Logits that are ordered together, if one row has no more: their keys take 8 bytes each."""


def judge(logits_SV: Tensor, tokens_S: Tensor, k: int) -> Tensor:
    """[S, 2 + 2 K] int32: what the rows say of *tokens_S* (int64) and of their *k* likeliest tokens; see `columns`.

    Log-probability (the bits of a float32), rank, ids of the likeliest, their log-probabilities (bits). Equal logits
    are in the order of their ids. The log-probabilities of a row with a NaN are NaN. Never waits for the device.
    """
    step = max(1, MOST_AT_ONCE // logits_SV.shape[-1])
    pieces = [
        _judge(logits_SV[at : at + step].to(torch.float32), tokens_S[at : at + step], k)
        for at in range(0, max(1, len(logits_SV)), step)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _judge(logits_SV: Tensor, tokens_S: Tensor, k: int) -> Tensor:
    said_S1 = tokens_S.unsqueeze(-1)
    norm_S1 = logits_SV.logsumexp(-1, keepdim=True)
    keys_SV = ordered(logits_SV)
    ranks_S1 = (keys_SV > keys_SV.gather(-1, said_S1)).sum(-1, keepdim=True) + 1
    ids_SK = logits_SV.shape[-1] - 1 - (keys_SV.topk(k).values & 0xFFFFFFFF)
    ids_SA = torch.cat((said_S1, ids_SK), -1)
    logprobs_SA = (logits_SV.gather(-1, ids_SA) - norm_S1).view(torch.int32)
    return torch.cat((logprobs_SA[:, :1], ranks_S1.int(), ids_SK.int(), logprobs_SA[:, 1:]), -1)


def ordered(logits_SV: Tensor) -> Tensor:
    """[S, V] int64, all different in a row, in the order of float32 logits; of equal ones the lowest id is the largest.

    The bits of a float32 order as a signed integer does, once those of negative numbers but the sign are flipped: they
    are the high 32 bits, the id counted from the end the low ones.
    """
    bits = (logits_SV + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = logits_SV.shape[-1] - 1
    return (bits.to(torch.int64) << 32) | torch.arange(last, -1, -1, device=logits_SV.device)


def filtered(logits_SV: Tensor, temperature: F32, top_k: I32, top_p: F32, min_p: F32) -> Tensor:
    """[S, V] float32: the logits, up to a constant a row, of the distribution that `ops.sample` draws from: over the
    temperature, -inf where a filter leaves nothing. Parameters: [S] each, on the host. Greedy rows: as they are.
    """
    noisy = temperature >= GREEDY_BELOW
    asked = np.where(noisy, [temperature, top_p, min_p, top_k], [[1.0], [1.0], [0.0], [0.0]]).astype(np.float32)
    there = put(asked, logits_SV.device).unsqueeze(-1)
    z_SV = (logits_SV.to(torch.float32) - logits_SV.max(-1, keepdim=True).values) / there[0]
    filters = noisy & ((top_p < 1) | (min_p > 0) | (top_k > 0))
    if not filters.any():
        return z_SV
    which = put(np.flatnonzero(filters), logits_SV.device)
    rows = z_SV.index_select(0, which)
    return z_SV.index_copy_(0, which, _cut(rows, *there[1:].index_select(1, which)))


def _cut(z_SV: Tensor, top_p_S1: Tensor, min_p_S1: Tensor, top_k_S1: Tensor) -> Tensor:
    """-inf where top-k, then top-p over the rest, then min-p leave nothing. Filters by the rules of ops.sample."""
    sorted_SV, ids_SV = torch.sort(z_SV, dim=-1, descending=True, stable=True)
    places = torch.arange(z_SV.shape[-1], device=z_SV.device)
    kept_SV = (places < top_k_S1) | (top_k_S1 <= 0)
    mass_SV = sorted_SV.exp().double() * kept_SV
    before_SV = mass_SV.cumsum(-1) - mass_SV
    kept_SV &= (before_SV < top_p_S1.double() * mass_SV.sum(-1, keepdim=True) * (1 - TIE)) | (top_p_S1 >= 1)
    kept_SV &= (sorted_SV >= min_p_S1.log() - TIE) | (min_p_S1 <= 0)
    return z_SV.scatter(-1, ids_SV, sorted_SV.masked_fill(~kept_SV, -torch.inf))


@frozen(eq=False)
class Judged:
    """What `judge` gave, on the host."""

    logprobs: F32
    """[S]"""
    ranks: I32
    """[S]"""
    top_ids: I32
    """[S, K]"""
    top_logprobs: F32
    """[S, K]"""


def judged(block: I32) -> Judged:
    """The columns of *block*, views of it."""
    k = (block.shape[1] - 2) // 2
    values = block.view(np.float32)
    return Judged(values[:, 0], block[:, 1], block[:, 2 : 2 + k], values[:, 2 + k :])


def records(block: I32, tokens: Iterable[int], wanted: Iterable[int]) -> Iterator[TokenLogprobs]:
    """The rows of *block*, which is of *tokens*, a record each, with the *wanted* likeliest of each, at most K."""
    found = judged(block)
    columns = (found.logprobs.tolist(), ints(found.ranks), ints(found.top_ids), found.top_logprobs.tolist())
    for token, k, logprob, rank, ids, values in zip(tokens, wanted, *columns, strict=True):
        yield TokenLogprobs(token, logprob, rank, tuple(ids[:k]), tuple(values[:k]))
