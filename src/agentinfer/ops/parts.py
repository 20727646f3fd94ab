"""Choosing tokens where each rank has the logits of its own part of the vocabulary: a few numbers are told, no logits.

Noise is keyed by seed, output index and token id, so each rank scores its own ids, and the best of the best is what
one rank would have chosen; ties go to the lowest id. All ranks come to the same tokens. Filters, edits and
log-probabilities need the whole row, and no rows that have any come here.

Shapes: S samples, V logits of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from agentinfer.ops.comm import Group
from agentinfer.ops.inputs import put
from agentinfer.ops.sample import GREEDY_BELOW, best_each, words
from agentinfer.state.ids import F32, I64
from agentinfer.state.plan import SamplingColumns

PartRows = Callable[[Tensor, Tensor, Tensor, Group, int, Tensor, Tensor], None]
"""(logits_SV float32, params, index, group, vocab_size, tokens, ok): as SampleRows, of logits that are cut. Heeds no
filters. All of it on the device without waiting, so that a graph can capture it."""


def choose_parts(
    part_rows: PartRows | None, logits_SV: Tensor, s: SamplingColumns, group: Group, vocab_size: int
) -> Tensor:
    """[2, S] int64: tokens, ok, the same on every rank of *group*; by *part_rows* where there is one, else on the host.

    *logits*: rank r has those of ids r * V and on. From *vocab_size* on they are padding. Heeds no filters and no bans.
    """
    if part_rows is None:
        return sample_parts(logits_SV, s, group, vocab_size)
    count, device = len(logits_SV), logits_SV.device
    there = put(np.concatenate((words(s).reshape(-1), s.index)), device)
    chosen = torch.empty((2, count), dtype=torch.int64, device=device)
    part_rows(logits_SV, there[: -count or None].view(count, -1), there[-count:], group, vocab_size, *chosen)
    return chosen


def sample_parts(logits_SV: Tensor, s: SamplingColumns, group: Group, vocab_size: int) -> Tensor:
    """`choose_parts` by `sample`'s own arithmetic: for equal logits its tokens, to the bit."""
    first = group.rank * logits_SV.shape[1]
    local = logits_SV[:, : max(0, vocab_size - first)].to(torch.float32)
    top_S, tokens_S = _best(*_largest(local, first), group)
    ok_S = top_S.isfinite()
    noisy = np.flatnonzero(s.temperature >= GREEDY_BELOW)
    if len(noisy):
        at = torch.from_numpy(noisy).to(local.device)
        tops = cast("list[float]", top_S.index_select(0, at).tolist())
        rows = cast(F32, local.index_select(0, at).cpu().numpy())
        left = [_alive(row, top, t, first) for row, top, t in zip(rows, tops, s.temperature[noisy], strict=True)]
        best = best_each(left, s.params["seed"][noisy].tolist(), s.index[noisy].tolist())
        own = torch.tensor([(-score, token) for score, token in best], dtype=torch.float64, device=local.device)
        tokens_S = tokens_S.index_copy(0, at, _best(own[:, 0], own[:, 1], group)[1])
    return torch.stack((tokens_S, ok_S.to(torch.int64)))


def _largest(logits_SV: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The largest logit of each sample, +inf where one is NaN, and its id; of none -inf. Float64 both."""
    count, held = logits_SV.shape
    if not held:
        nothing = logits_SV.new_full((count,), -torch.inf, dtype=torch.float64)
        return nothing, torch.zeros_like(nothing)
    at = logits_SV.argmax(-1, keepdim=True)
    value = logits_SV.gather(-1, at).squeeze(-1).to(torch.float64)
    return value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), (at.squeeze(-1) + first).double()


def _best(value_S: Tensor, id_S: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Of the pairs of all ranks the largest value, and its id (int64): of equal ones that of the lowest rank, which is
    the lowest.
    """
    each = group.all_gather_last_dim(torch.stack((value_S, id_S), -1)).view(len(value_S), group.size, 2)
    value, ids = each.unbind(-1)
    top = value.amax(-1, keepdim=True)
    lowest = ids.masked_fill(value != top, torch.inf).amin(-1)
    return top.squeeze(-1), lowest.to(torch.int64)


def _alive(logits_V: F32, top: float, temperature: float, first: int) -> tuple[I64, F32]:
    """Token ids that can be chosen, and their z, as `survivors` has them; none where the row is not sound."""
    if not np.isfinite(top):
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    with np.errstate(over="ignore"):
        z = (logits_V - np.float32(top)) / np.float32(temperature)
    alive = np.flatnonzero(z > -np.inf)
    return alive + first, z[alive]
