"""EngineState: the whole truth of one engine's control plane, as one value."""

from __future__ import annotations

import hashlib
import marshal
from operator import attrgetter

import numpy as np
from attrs import astuple, fields_dict, frozen

from agentinfer.state.blocks import BlockPool
from agentinfer.state.columns import FIELDS, Columns
from agentinfer.state.ids import I32, SeqId, ints, seal
from agentinfer.state.limits import Limits
from agentinfer.state.log import Queue
from agentinfer.state.plan import Plan, TableEntries
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.sequence import Finished, Running, Status, Waiting
from agentinfer.state.show import state_html


@frozen(eq=False)
class EngineState:
    """Immutable. Every transition is a function from one of these to the next."""

    limits: Limits
    step: int
    """Number of the next plan."""
    next_seq: int
    waiting: Queue[Waiting]
    """In order of arrival."""
    requeued: tuple[Waiting, ...]
    """Preempted or forked sequences, oldest first: they go before `waiting`."""
    rows: tuple[Running | None, ...]
    """[max_num_seqs + 1]; row 0 is always None."""
    order: I32
    """The rows in use, oldest sequence first."""
    cols: Columns
    pool: BlockPool
    version: int
    """Of the model's weights: how often they were swapped."""
    retabled: tuple[TableEntries, ...]
    """Block-table entries that changed since the last plan (a block was exchanged for its equal in the cache)."""
    last: Plan | None
    """The plan before the next one, if it came from this state's past: what a steady decode has in common with it."""
    ended: tuple[Finished, ...]
    """Ended outside commit since the last Output: rejected, aborted, failed."""

    def _repr_html_(self) -> str:
        return state_html(self)


def initial(limits: Limits) -> EngineState:
    """An engine with nothing to do."""
    order = np.zeros(0, np.int32)
    seal(order)
    return EngineState(
        limits=limits,
        step=0,
        next_seq=0,
        waiting=Queue[Waiting].of(),
        requeued=(),
        rows=(None,) * (limits.max_num_seqs + 1),
        order=order,
        cols=Columns.empty(limits),
        pool=BlockPool.empty(limits.num_blocks),
        version=0,
        retabled=(),
        last=None,
        ended=(),
    )


def has_work(state: EngineState) -> bool:
    """Whether any sequence is waiting or running."""
    return bool(len(state.order) or len(state.waiting) or state.requeued)


def find_running(state: EngineState, seq: SeqId) -> Running | None:
    """The running sequence *seq*, or None."""
    rows = np.flatnonzero(state.cols.seq == seq)
    return state.rows[int(rows[0])] if len(rows) and seq >= 0 else None


def find_waiting(state: EngineState, seq: SeqId) -> Waiting | None:
    """The waiting sequence *seq*, or None."""
    for waiting in (*state.requeued, *state.waiting):
        if waiting.seq == seq:
            return waiting
    return None


def live(state: EngineState) -> set[SeqId]:
    """The sequences that wait or run."""
    running = (run.seq for run in state.rows if run is not None)
    return {*running, *(waiting.seq for waiting in (*state.requeued, *state.waiting))}


def known_tokens(run: Running, known: int, tail: I32, first: int = 0) -> tuple[int, ...]:
    """All tokens of *run* whose value is known, from position *first* on. *tail* is Columns.tail."""
    size, full = tail.shape[1], len(run.tokens)
    skipped = min(first // size, full)
    found = [token for block in run.tokens[skipped:] for token in block]
    found += ints(tail[run.row, : known - full * size])
    return tuple(found[first - skipped * size :])


def tokens_of(state: EngineState, seq: SeqId, first: int = 0) -> tuple[int, ...]:
    """Prompt and output so far of a live sequence, from position *first* on. Raises KeyError if *seq* is not live."""
    run = find_running(state, seq)
    if run is not None:
        return known_tokens(run, int(state.cols.known[run.row]), state.cols.tail, first)
    waiting = find_waiting(state, seq)
    if waiting is None:
        raise KeyError(seq)
    return waiting.tokens[first:]


def status(state: EngineState, seq: SeqId) -> Status:
    """Where *seq* is in its life, derived. A sequence that has left the state is FINISHED.

    Raises KeyError for an id that was never given out.
    """
    run = find_running(state, seq)
    if run is not None:
        return "PREFILL" if state.cols.computed[run.row] < state.cols.known[run.row] - 1 else "DECODE"
    if find_waiting(state, seq) is not None:
        return "WAITING"
    for ended in state.ended:
        if ended.seq == seq and ended.reason in ("rejected", "abort"):
            return "REJECTED" if ended.reason == "rejected" else "ABORTED"
    if not 0 <= seq < state.next_seq:
        raise KeyError(seq)
    return "FINISHED"


def _reader(record: type) -> attrgetter[tuple[object, ...]]:
    """Reads all fields of a *record* with a request, the request's and its parameters' too: plain values, read in C.
    Only structured_outputs is left out, which is none.
    """
    own = [name for name in fields_dict(record) if name != "request"]
    asked = [f"request.{name}" for name in fields_dict(Request) if name != "params"]
    params = [f"request.params.{name}" for name in fields_dict(SamplingParams) if name != "structured_outputs"]
    return attrgetter(*own, *asked, *params)


_read_waiting = _reader(Waiting)
_read_running = _reader(Running)


def _facts_of(record: Waiting | Running) -> tuple[object, ...]:
    facts = _read_waiting(record) if isinstance(record, Waiting) else _read_running(record)
    form = record.request.params.structured_outputs
    return facts if form is None else (*facts, astuple(form, recurse=False))


def digest(state: EngineState) -> str:
    """Name the state by its content, in 16 hex digits: equal on every rank and in every replay.

    `ended` is left out: it is mail on its way, and when it is taken changes nothing that follows. So is `last`,
    which only saves work.
    """
    h = hashlib.blake2b(digest_size=8)
    for name in FIELDS:
        h.update(getattr(state.cols, name).tobytes())
    h.update(state.pool.refs.tobytes())
    h.update(state.order.tobytes())
    pool = state.pool
    h.update(np.array(list(pool.free), np.int32).tobytes())
    h.update(repr((state.limits, state.retabled)).encode())
    facts = (
        state.step,
        state.next_seq,
        state.version,
        [_facts_of(waiting) for waiting in state.waiting],
        [_facts_of(waiting) for waiting in state.requeued],
        [run and _facts_of(run) for run in state.rows],
        [entry for entry in pool.lru if pool.cached.get(entry[0]) == entry[1]],
        sorted((block, key.hash, key.parent) for block, key in pool.keys.items()),
    )
    h.update(marshal.dumps(facts, 0))  # several times faster than repr; 0: by value, not by who shares an object
    return h.hexdigest()
