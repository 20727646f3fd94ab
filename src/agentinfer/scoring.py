"""How likely a model finds given tokens: exact log-probabilities in one call, beside whatever the engine is doing.

The distribution is the raw model's: no temperature, no filter, nothing banned. Scoring has KV memory of its own, which
it gives back: the engine's state, prefix cache and traces do not know of it. On a GPU that memory comes out of what
`reserve_gib` left free: KV of a pass (max_num_batched_tokens positions, or the longest sequence), and its logits.

Knows how to cut sequences into forward passes. N tokens a sequence, S positions a pass, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from agentinfer.errors import AgentInferError, InvalidRequest
from agentinfer.loop import Engine
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import KvLayout, allocate
from agentinfer.result import Prompt, token_ids
from agentinfer.state.ids import F32, I32, cdiv
from agentinfer.steps import Machine, prefill_step

MOST_LOGITS: Final = 1 << 25
"""Logits of one pass at most, if one position has no more."""


@frozen(eq=False)
class Score:
    """The log-probability of each token but the first, given those before it."""

    tokens: tuple[int, ...]
    logprobs: F32
    """[N - 1] of tokens[1:]; NaN where the model's logits are NaN."""
    ranks: I32
    """[N - 1] place of each among all tokens, 1 for the likeliest; of equal ones the lowest id first."""
    top_ids: I32
    """[N - 1, K] the likeliest tokens in the place of each, likeliest first; of equal ones the lowest id first."""
    top_logprobs: F32
    """[N - 1, K] theirs."""


def score(engine: Engine, prompts: Sequence[Prompt], top: int = 0) -> list[Score]:
    """Score *prompts* (texts, or token ids) with the *top* likeliest alternatives of each token.

    Raises InvalidRequest naming the field: a prompt without tokens, with ids that the model has not, or longer than
    max_model_len; *top* outside of the vocabulary. Raises AgentInferError for an engine of several ranks.
    """
    m = engine.machine
    if m.ranks.tp.size > 1:
        raise AgentInferError("score: an engine of several ranks can not score yet: the others would not know")
    if type(top) is not int or not 0 <= top <= m.limits.vocab_size:
        raise InvalidRequest("top", f"must be an integer in [0, {m.limits.vocab_size}], not {top!r}")
    asked = [_checked(m, token_ids(engine.text, prompt), i) for i, prompt in enumerate(prompts)]
    most = max(1, min(m.limits.max_num_batched_tokens, MOST_LOGITS // m.limits.vocab_size))
    layouts = tuple(layer.layout for layer in engine.world.device.kv.layers)
    found: list[Score] = []
    for group in groups([len(tokens) - 1 for tokens in asked], most):
        found += _score_together(m, layouts, [asked[i] for i in group], most, top)
    return found


def groups(counts: Sequence[int], most: int) -> list[list[int]]:
    """Neighbours that are computed together: *most* positions in all, of *counts*; one that has more is alone."""
    found: list[list[int]] = []
    room = 0
    for i, count in enumerate(counts):
        if not found or count > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= count
    return found


def _checked(m: Machine, tokens: tuple[int, ...], index: int) -> tuple[int, ...]:
    field, limits = f"prompts[{index}]", m.limits
    if not tokens:
        raise InvalidRequest(field, "has no tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise InvalidRequest(field, f"token id {token!r} is outside the vocabulary of {limits.vocab_size}")
    if len(tokens) > limits.max_model_len:
        raise InvalidRequest(field, f"has {len(tokens)} tokens; max_model_len is {limits.max_model_len}")
    return tokens


def _score_together(
    m: Machine, layouts: Sequence[KvLayout], asked: Sequence[tuple[int, ...]], most: int, top: int
) -> list[Score]:
    """The scores of *asked*, in one pass, or a single one in passes of *most* positions."""
    size = layouts[0].block_size
    count = [len(tokens) - 1 for tokens in asked]
    need = [cdiv(n, size) for n in count]
    first = np.cumsum([1, *need])
    blocks = [list(range(at, at + n)) for at, n in zip(first.tolist(), need, strict=False)]
    pieces: list[tuple[F32, I32, I32, F32]] = [_judge(torch.empty(0, m.limits.vocab_size), torch.empty(0).long(), top)]
    kv = allocate(layouts, max(1, sum(need)), len(asked), max(1, *need), m.ranks.device)
    for at in range(0, max(count), most):
        given = [tokens[at : min(at + most, len(tokens) - 1)] for tokens in asked]
        rows = [i for i, tokens in enumerate(given) if tokens]
        x, kv = by_hand(
            kv, [given[i] for i in rows], [at] * len(rows), [blocks[i] for i in rows], [i + 1 for i in rows], every=True
        )
        logits_SV, kv = prefill_step(m, kv, x)
        said = torch.tensor([t for i in rows for t in asked[i][at + 1 : at + 1 + len(given[i])]])
        pieces.append(_judge(logits_SV, said.to(logits_SV.device), top))
    logprobs, ranks, ids, tops = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    edges = np.cumsum(count)[:-1]
    split = zip(asked, *(np.split(column, edges) for column in (logprobs, ranks, ids, tops)), strict=True)
    return [Score(*one) for one in split]


def _judge(logits_SV: Tensor, said_S: Tensor, top: int) -> tuple[F32, I32, I32, F32]:
    """Log-probability [S] and rank [S] of *said_S* (int64), ids and log-probabilities of the *top* likeliest [S, K]."""
    own = logits_SV.gather(-1, said_S.unsqueeze(-1))
    norm = logits_SV.logsumexp(-1, keepdim=True)
    before = torch.arange(logits_SV.shape[-1], device=logits_SV.device) < said_S.unsqueeze(-1)
    ranks = ((logits_SV > own) | ((logits_SV == own) & before)).sum(-1) + 1
    ids, values = _likeliest(logits_SV, top)
    tops = values - norm.cpu().numpy()
    return (own - norm).squeeze(-1).cpu().numpy(), ranks.cpu().numpy().astype(np.int32), ids, tops


def _likeliest(logits_SV: Tensor, k: int) -> tuple[I32, npt.NDArray[np.float32]]:
    """Ids and logits [S, K] of the K largest of each row; of equal ones the lowest ids, which topk does not promise."""
    count = len(logits_SV)
    if not k or not count:
        return np.empty((count, k), np.int32), np.empty((count, k), np.float32)
    least = logits_SV.topk(k).values[:, -1:]
    place = (logits_SV >= least).nonzero()
    values = logits_SV[place[:, 0], place[:, 1]].cpu().numpy()
    rows, ids = place.cpu().numpy().T
    order = np.lexsort((ids, -values, rows))
    start = np.searchsorted(rows, np.arange(count))
    taken = order[(start[:, None] + np.arange(k)).ravel()]
    return ids[taken].reshape(count, k).astype(np.int32), values[taken].reshape(count, k)
