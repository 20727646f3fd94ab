"""Policies: who is served in a step. Plain functions from a state to the turns they propose; write your own.

A policy decides, `schedule` keeps the rules: whatever a policy proposes, no budget is overrun, no block is
written twice and nothing is lost. What a policy can do wrong is to serve nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

import numpy as np
from attrs import frozen

from agentinfer.state.engine import EngineState
from agentinfer.state.ids import I32, SeqId, some, total
from agentinfer.state.sequence import Waiting

NOBODY: Final = np.zeros(0, np.int32)
NOBODY.flags.writeable = False


@frozen(eq=False)
class Turn:
    """One proposal for the next step."""

    rows: I32
    """[K] running rows to serve."""
    count: I32
    """[K] positions to compute of each, at most what it needs; 0 leaves it out."""
    admit: Iterable[Waiting]
    """Waiting sequences to try in this order, until one does not fit."""
    victims: I32
    """Running rows that may be preempted when blocks are short, first to go first."""
    reserve: bool
    """Admit only what surely runs to its end, whatever the others do."""
    short: bool = False
    """Some row that wanted to run was left out: note whose turn it was."""


Policy = Callable[[EngineState], Iterable[Turn]]
"""Turns in the order of preference: the first that gives work becomes the plan."""


def queue(state: EngineState) -> Iterator[Waiting]:
    """All waiting sequences: preempted and forked ones first, then in order of arrival. A fork whose parent waits too
    comes behind it, wherever that is: it can not be admitted before.
    """
    everybody = chain(state.requeued, state.waiting)
    return _behind_parents(everybody) if any(w.parent != w.seq for w in state.requeued) else everybody


def _behind_parents(queue: Iterable[Waiting]) -> Iterator[Waiting]:
    everybody = tuple(queue)
    to_come = {waiting.seq for waiting in everybody}
    held: dict[SeqId, list[Waiting]] = {}
    for waiting in everybody:
        if waiting.parent != waiting.seq and waiting.parent in to_come:
            held.setdefault(waiting.parent, []).append(waiting)
            continue
        now = [waiting]
        while now:
            one = now.pop(0)
            yield one
            to_come.discard(one.seq)
            now = held.pop(one.seq, []) + now


def needs(state: EngineState) -> I32:
    """Positions each row of `state.order` could compute now. A promised last token is never fed back."""
    cols, order = state.cols, state.order
    return np.minimum(cols.length.take(order), cols.limit.take(order) - 1) - cols.computed.take(order)


def throughput(state: EngineState) -> Iterator[Turn]:
    """Mixed batches, optimistic admission, preemption by recompute with the newest sequence first.

    Every running row gets one position; what the budget has left goes to prefilling rows, oldest first, then
    to admissions, first come first served. When the budget is too short for one position each, those who
    waited longest go first, so a running row waits at most ceil(max_num_seqs / max_num_batched_tokens) - 1
    steps in a row. The oldest sequence is never preempted.
    """
    need, budget = needs(state), state.limits.max_num_batched_tokens
    victims = state.order[:0:-1]
    if total(need) <= budget:
        yield Turn(state.order, need, queue(state), victims, reserve=False)
        return
    count = np.zeros_like(need)
    able = np.flatnonzero(need > 0)
    first = able[np.argsort(state.cols.turn[state.order[able]], kind="stable")][:budget]
    count[first] = 1
    count += _oldest_first(need - count, budget - len(first), count > 0)
    yield Turn(state.order, count, queue(state), victims, reserve=False, short=len(first) < len(able))


def reserve(state: EngineState) -> Iterator[Turn]:
    """Prefill first and never mixed with decode; nothing is ever preempted, so a deadlock is impossible.

    A sequence is admitted, first come first served, only when all the blocks it can ever need are to be had
    beside those that the running ones may still take. Decode waits as long as prompts keep coming.
    """
    need, budget = needs(state), state.limits.max_num_batched_tokens
    prefill = need > 1
    prefilling = some(prefill)
    if prefilling or len(state.waiting) or state.requeued:
        count = _oldest_first(need, budget, prefill)
        yield Turn(state.order, count, queue(state), NOBODY, reserve=True)
    count = np.where(prefill, np.int32(0), need) if prefilling else need
    if total(count) <= budget:
        yield Turn(state.order, count, (), NOBODY, reserve=True)
        return
    able = np.flatnonzero(count)
    first = able[np.argsort(state.cols.turn[state.order[able]], kind="stable")][:budget]
    served = np.zeros_like(count)
    served[first] = 1
    yield Turn(state.order, served, (), NOBODY, reserve=True, short=True)


def _oldest_first(need: I32, budget: int, among: np.ndarray) -> I32:
    """Deal *budget* positions out over the rows of *among*, each all it needs, in their order."""
    ends = np.minimum(np.cumsum(np.where(among, need, 0)), budget)
    return np.diff(ends, prepend=0).astype(np.int32)


POLICIES: Mapping[str, Policy] = MappingProxyType({"reserve": reserve, "throughput": throughput})
"""The policies that a command line or a trace can name."""
