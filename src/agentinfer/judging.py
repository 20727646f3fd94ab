"""What the logits of a step say of its tokens: which rows are asked, and the answers as records once they are here.

Knows plans and logits. Of a plan that wants nothing, nothing is computed. S samples, N of them that want
log-probabilities (or N tokens of prompts), P that were edited, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from attrs import frozen
from torch import Tensor

from agentinfer.ops.inputs import put
from agentinfer.ops.logprobs import filtered, judge, records
from agentinfer.state.ids import I32, I64, ints
from agentinfer.state.logprobs import TokenLogprobs
from agentinfer.state.plan import Plan

RAW: Final = "raw_logprobs"
"""Of the model's own distribution, before anything that a request asks for."""
PROCESSED: Final = "processed_logprobs"
"""Of the distribution that the token was drawn from: after edits, temperature and filters."""
MODES: Final = (RAW, PROCESSED)


@frozen(eq=False)
class Basis:
    """What the samples that want log-probabilities are judged by."""

    which: I64
    """[N] ascending."""
    logits_NV: Tensor
    """float32; a copy that nobody else has."""
    processed: bool


def wanting(plan: Plan) -> I64:
    """The samples of *plan* that want log-probabilities, ascending."""
    return np.zeros(0, np.int64) if plan.logprobs is None else np.flatnonzero(plan.logprobs >= 0)


def basis_of(plan: Plan, mode: str, logits_RV: Tensor, row_of: I64 | None = None) -> Basis | None:
    """What *plan*'s samples are judged by, where nothing edits them; None: none wants it.

    *row_of*: [S] the row of the raw logits of each sample; None: its own number.
    """
    which = wanting(plan)
    if not len(which):
        return None
    logits_NV = logits_RV.index_select(0, put(which if row_of is None else row_of[which], logits_RV.device))
    if mode == PROCESSED:
        logits_NV = _filtered(plan, which, logits_NV)
    return Basis(which, logits_NV, mode == PROCESSED)


def replace_edited(basis: Basis, plan: Plan, which: Sequence[int], logits_PV: Tensor) -> None:
    """Judge the samples *which* by their edited logits, if that is what is asked for: writes those of *basis*."""
    both, at, mine = np.intersect1d(basis.which, np.array(which, np.int64), return_indices=True)
    if basis.processed and len(both):
        there = put(np.stack((at, mine)), logits_PV.device)
        basis.logits_NV.index_copy_(0, there[0], _filtered(plan, both, logits_PV.index_select(0, there[1])))


def _filtered(plan: Plan, which: I64, logits_NV: Tensor) -> Tensor:
    s = plan.sampling
    return filtered(logits_NV, s.temperature[which], s.top_k[which], s.top_p[which], s.min_p[which])


def judge_samples(plan: Plan, basis: Basis | None, tokens_S: Tensor) -> Tensor | None:
    """`judge`'s block of the samples of *basis*. *tokens_S*: int64, what all samples chose."""
    if basis is None or plan.logprobs is None:
        return None
    tokens_N = tokens_S.index_select(0, put(basis.which, tokens_S.device))
    return judge(basis.logits_NV, tokens_N, int(plan.logprobs.max()))


def judge_scored(plan: Plan, logits_NV: Tensor) -> Tensor | None:
    """`judge`'s block of the tokens of prompts that *plan* scores, of which these are the logits; None: of none."""
    if plan.scored is None:
        return None
    return judge(logits_NV, put(plan.scored.tokens.astype(np.int64), logits_NV.device), int(plan.scored.top.max()))


def of_samples(plan: Plan, tokens: I32, block: I32 | None) -> tuple[TokenLogprobs | None, ...] | None:
    """Sampled.logprobs: *block* is what `judge_samples` gave."""
    if block is None or plan.logprobs is None:
        return None
    which = wanting(plan)
    found = iter(records(block, ints(tokens[which]), ints(plan.logprobs[which])))
    return tuple(next(found) if k >= 0 else None for k in ints(plan.logprobs))


def of_scored(plan: Plan, block: I32 | None) -> tuple[TokenLogprobs, ...] | None:
    """Sampled.scored: *block* is what `judge_scored` gave."""
    if block is None or plan.scored is None:
        return None
    return tuple(records(block, ints(plan.scored.tokens), ints(plan.scored.top)))
