"""swap: the model's weights are others. What was sampled keeps the version that sampled it. Pure.

KV is a cache of tokens and weights. The prefix cache forgets all that it knows, and what runs goes on over the KV that
it has: the new weights read keys and values of the old ones, as is usual in reinforcement learning. Such a sequence is
`stale`: it registers nothing and shares nothing, until a preemption has it computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from agentinfer.state.admit import release
from agentinfer.state.blocks import forgotten
from agentinfer.state.engine import EngineState, known_tokens
from agentinfer.state.log import Queue
from agentinfer.state.sequence import Running, Waiting, again, since


def swap(state: EngineState, *, recompute: bool = False) -> EngineState:
    """*state*, whose next step computes with the next version of the weights.

    *recompute*: what runs waits once more, with the tokens it knows, so that no old KV is read; what is in flight lands
    into nothing. Else tokens that are in flight, and so promised, are the old version's.
    """
    version = state.version + 1
    running = [run for run in state.rows if run is not None]
    requeued = state.requeued
    if recompute:
        back = [again(run, _known(state, run), int(state.cols.cached[run.row])) for run in running]
        requeued = tuple(sorted([*back, *requeued], key=lambda w: w.seq))
        state = release(state, running)
        rows = state.rows
    else:
        rows = tuple(run and _gone_on(run, int(state.cols.length[run.row]), version) for run in state.rows)
    return evolve(
        state,
        version=version,
        waiting=Queue[Waiting].of(sampled_by(state.waiting, version)),
        requeued=tuple(sampled_by(requeued, version)),
        rows=rows,
        pool=forgotten(state.pool),
        last=None,
    )


def sampled_by(waiting: Iterable[Waiting], version: int) -> Iterable[Waiting]:
    """*waiting*, whose next tokens that *version* samples."""
    return (evolve(w, versions=since(w.versions, len(w.tokens), version)) for w in waiting)


def _known(state: EngineState, run: Running) -> tuple[int, ...]:
    return known_tokens(run, int(state.cols.known[run.row]), state.cols.tail)


def _gone_on(run: Running, length: int, version: int) -> Running:
    return evolve(run, hashes=(), versions=since(run.versions, length, version), stale=True)
