"""How likely a model finds given tokens: exact log-probabilities in one call, beside whatever the engine is doing.

The distribution is the raw model's: no temperature, no filter, nothing banned. Scoring has KV memory of its own, which
it gives back: the engine's state, prefix cache and traces do not know of it. On a GPU that memory comes out of what
`reserve_gib` left free: KV of a pass (max_num_batched_tokens positions, or the longest sequence), and its logits.

Knows how to cut sequences into forward passes. N tokens a sequence, S positions a pass, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine
from agentinfer.ops.inputs import by_hand, put
from agentinfer.ops.kv import KvLayout, allocate
from agentinfer.ops.logprobs import Judged, judge, judged
from agentinfer.result import Prompt, token_ids
from agentinfer.state.ids import F32, I32, cdiv
from agentinfer.state.wanted import most_scored
from agentinfer.steps import Device, Machine, prefill_step


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
    max_model_len; *top* outside of the vocabulary.
    """
    m = engine.machine
    if type(top) is not int or not 0 <= top <= m.limits.vocab_size:
        raise InvalidRequest("top", f"must be an integer in [0, {m.limits.vocab_size}], not {top!r}")
    asked = [_checked(m, token_ids(engine.text, prompt), i) for i, prompt in enumerate(prompts)]
    with engine.others({"score": asked}):
        return score_along(m, engine.world.device, asked, top)


def score_along(m: Machine, device: Device, asked: Sequence[Sequence[int]], top: int = 0) -> list[Score]:
    """The scores of *asked* on a device like *device*, which is not touched. All ranks call this; those that are not 0
    compute their part of it, and get nothing.
    """
    most = min(m.limits.max_num_batched_tokens, most_scored(m.limits))
    layouts = tuple(layer.layout for layer in device.kv.layers)
    found: list[Score] = []
    for group in groups([len(tokens) - 1 for tokens in asked], most):
        found += _score_together(m, layouts, [tuple(asked[i]) for i in group], most, top)
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
    pieces = [np.empty((0, 2 + 2 * top), np.int32)]
    kv = allocate(layouts, max(1, sum(need)), len(asked), max(1, *need), m.ranks.device)
    for at in range(0, max(count), most):
        given = [tokens[at : min(at + most, len(tokens) - 1)] for tokens in asked]
        rows = [i for i, tokens in enumerate(given) if tokens]
        x, kv = by_hand(
            kv, [given[i] for i in rows], [at] * len(rows), [blocks[i] for i in rows], [i + 1 for i in rows], every=True
        )
        logits_SV, kv = prefill_step(m, kv, x)
        if m.ranks.tp.rank:  # all have the logits of the whole vocabulary; rank 0 alone is asked
            continue
        said = np.array([t for i in rows for t in asked[i][at + 1 : at + 1 + len(given[i])]], np.int64)
        pieces.append(judge(logits_SV, put(said, logits_SV.device), top).cpu().numpy())
    if m.ranks.tp.rank:
        return []
    found = np.split(np.concatenate(pieces), np.cumsum(count)[:-1])
    return [_score(tokens, judged(block)) for tokens, block in zip(asked, found, strict=True)]


def _score(tokens: tuple[int, ...], found: Judged) -> Score:
    return Score(tokens, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
