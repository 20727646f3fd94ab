"""commit: fold the tokens of a step into the state. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import numpy as np
from attrs import evolve

from agentinfer.state.blocks import ROOT, BlockHash, PoolDraft, block_hash
from agentinfer.state.columns import PARAMS, ColumnsDraft
from agentinfer.state.engine import EngineState, known_tokens
from agentinfer.state.ids import I32, BlockId, Bool, Row, SeqId, every, ints, seal, some
from agentinfer.state.plan import Output, Plan, PromptLogprobs, Sampled, TableEntries
from agentinfer.state.request import edits_logits
from agentinfer.state.sequence import Finished, FinishReason, Running


def commit(
    state: EngineState, plan: Plan, sampled: Sampled, hasher: BlockHash = block_hash
) -> tuple[EngineState, Output]:
    """Record the tokens of *plan*, remember the blocks it completed, end what has ended.

    Rows that ended, were preempted or were given away since the plan was made are skipped. A sample that is
    not `ok` ends its sequence with an error, nothing of that step is remembered, and what earlier steps, or others,
    remembered of its tokens is forgotten, but for blocks that others hold. Raises ValueError if *sampled* has not one
    token a sample.
    """
    if len(sampled.tokens) != len(plan.samples):
        raise ValueError(f"step {plan.step}: {len(sampled.tokens)} tokens for {len(plan.samples)} samples")
    draft = _Draft(state, hasher)
    cols, size = draft.cols, state.limits.block_size
    rows, context, count, sample_rows, tokens, ok = (
        plan.rows, plan.context, plan.count, plan.sample_rows, sampled.tokens, sampled.ok,
    )  # fmt: skip
    logprobs, scored = sampled.logprobs, _scored(cols, plan, sampled) if sampled.scored else ()
    if rows is not state.order:  # the very same column: nobody came or went since
        landed = (cols.seq.take(rows) == plan.seqs) & (cols.born.take(rows) <= plan.step)
    else:
        landed = None
    if landed is not None and not every(landed):
        alive = landed[sample_rows]
        renumbered = np.cumsum(landed, dtype=np.int32) - 1
        sample_rows, tokens, ok = renumbered[sample_rows[alive]], tokens[alive], ok[alive]
        logprobs = logprobs and tuple(compress(logprobs, alive))
        rows, context, count = rows[landed], context[landed], count[landed]
    cols.own("written")[rows] = context
    at, landed_rows = context % size, rows
    touched = at < count  # rows that completed a block of KV

    if len(sample_rows) < len(rows):
        rows, before, at = rows[sample_rows], context[sample_rows], at[sample_rows]
    else:
        before = context
    broken = rows[:0]
    if not every(ok):
        broken = rows[~ok]
        rows, tokens, before, at = rows[ok], tokens[ok], before[ok], at[ok]
        logprobs = logprobs and tuple(compress(logprobs, ok))
    after = before + 1
    cols.own("tail").ravel()[rows * np.int32(size) + at] = tokens
    cols.own("known")[rows] = after
    stopped = _stopped(cols, rows, tokens, before)
    ended = stopped | (after >= cols.limit.take(rows))

    full = at == size - 1
    if some(full):
        for row in ints(rows[full]):
            _fill(draft, row)
    if state.limits.prefix_cache and some(touched):
        for row in ints(landed_rows[touched]):
            if row not in broken:  # a healthy row of the same tokens would take these blocks
                _remember(draft, row)
    _end(draft, rows, tokens, ended, stopped, broken)
    seqs = plan.seqs if rows is plan.rows else state.cols.seq.take(rows)
    seal(seqs, tokens)
    finished = (*state.ended, *draft.finished)
    output = Output(plan.step, seqs, tokens, finished, logprobs, scored)
    return _next_state(draft, ended=bool(len(draft.finished))), output


def _scored(cols: ColumnsDraft, plan: Plan, sampled: Sampled) -> tuple[PromptLogprobs, ...]:
    """What the step found of prompts, but for rows that are no longer what they were in its plan."""
    if plan.scored is None or sampled.scored is None:
        return ()
    found: list[PromptLogprobs] = []
    which = plan.scored.rows
    for i in ints(np.unique(which)):
        row, seq = plan.rows[i], plan.seqs[i]
        if cols.seq[row] == seq and cols.born[row] <= plan.step:
            first, last = np.searchsorted(which, (i, i + 1))
            found.append((SeqId(int(seq)), int(plan.scored.positions[first]), sampled.scored[first:last]))
    return tuple(found)


def _stopped(cols: ColumnsDraft, rows: I32, tokens: I32, before: I32) -> Bool:
    """Which of *tokens* end their sequences, that had *before* tokens."""
    hits = cols.stop.take(rows, axis=0) == tokens[:, None]
    if not np.count_nonzero(hits):
        return hits[:, 0]
    return hits.any(axis=1) & (before >= cols.params.take(rows, axis=0).view(PARAMS)["floor"][:, 0])


def flush(state: EngineState) -> tuple[EngineState, Output | None]:
    """What ended outside a step, as an Output without tokens; None if nothing did."""
    if not state.ended:
        return state, None
    none = np.zeros(0, np.int32)
    seal(none)
    return evolve(state, ended=()), Output(state.step - 1, none, none, state.ended)


class _Draft:
    """What one call of commit builds. Mutable on purpose; it never escapes."""

    def __init__(self, state: EngineState, hasher: BlockHash) -> None:
        self.state = state
        self.cols = ColumnsDraft(state.cols)
        self.pool = PoolDraft(state.pool, state.limits.seed, hasher)
        self.rows: list[Running | None] | None = None
        self.retabled: list[TableEntries] = []
        self.finished: list[Finished] = []

    def running(self, row: int) -> Running:
        """The record of a row in use."""
        run = self.state.rows[row] if self.rows is None else self.rows[row]
        if run is None:
            raise IndexError(f"row {row} is not in use")
        return run

    def put(self, row: int, run: Running | None) -> None:
        """Set the record of *row*."""
        if self.rows is None:
            self.rows = list(self.state.rows)
        self.rows[row] = run


def _fill(draft: _Draft, row: int) -> None:
    """Move a tail block that has just become full from the columns to the record."""
    run = draft.running(row)
    tokens = (*run.tokens, tuple(ints(draft.cols.tail[row])))
    rest = (run.blocks, run.hashes, run.versions, run.stale)
    draft.put(row, Running(run.seq, run.request, run.seed, run.row, tokens, *rest))


def _remember(draft: _Draft, row: int) -> None:
    """Register the full blocks of *row* whose KV has landed; exchange those whose content is known already."""
    run, pool = draft.running(row), draft.pool
    if run.stale:
        return
    full = min(int(draft.cols.written[row]) // draft.state.limits.block_size, len(run.tokens))
    blocks, hashes = run.blocks, list(run.hashes)
    for i in range(len(hashes), full):
        parent = blocks[i - 1] if i else ROOT
        found, h = pool.find(parent, run.request.salt, run.tokens[i])
        if found is None:
            if not pool.register(blocks[i], parent, run.request.salt, run.tokens[i], h):
                break  # another content has this hash; what follows could not be found either
        elif found != blocks[i]:
            blocks = _exchange(draft, run.row, blocks, i, found)
        hashes.append(h)
    if len(hashes) > len(run.hashes):
        known = (run.tokens, blocks, tuple(hashes), run.versions)
        draft.put(row, Running(run.seq, run.request, run.seed, run.row, *known))


def _exchange(draft: _Draft, row: Row, blocks: tuple[BlockId, ...], i: int, found: BlockId) -> tuple[BlockId, ...]:
    """Hold *found* in the place of block *i*, which has the same content: equal prefixes are kept once."""
    draft.pool.hold((found,))
    draft.pool.drop((blocks[i],))
    draft.retabled.append((row, i, (found,)))
    return (*blocks[:i], found, *blocks[i + 1 :])


def _end(draft: _Draft, rows: I32, tokens: I32, ended: Bool, stopped: Bool, broken: I32) -> None:
    """Release what has ended."""
    if some(ended):
        for row, token, stop in zip(ints(rows[ended]), ints(tokens[ended]), ints(stopped[ended]), strict=True):
            _finish(draft, row, "stop" if stop else "length", str(token) if stop else "")
    failed = [draft.running(row) for row in ints(broken)]
    for row, run in zip(ints(broken), failed, strict=True):
        masked = "no token is left to choose, or " if edits_logits(run.request.params) else ""
        _finish(draft, row, "error", f"{masked}the logits are not finite")
    draft.pool.forget(head for run in failed for head in _first_unheld(draft.pool, run))
    if draft.finished:
        draft.cols.clear([*ints(rows[ended]), *ints(broken)])


def _first_unheld(pool: PoolDraft, run: Running) -> Iterator[BlockId]:
    """The first block that holds tokens of *run*, which has ended, and that nobody holds; none if all are held."""
    block: BlockId | None = ROOT
    for tokens in () if run.stale else run.tokens:
        block, _ = pool.find(block, run.request.salt, tokens)
        if block is None:
            return
        if pool.refs[block] == 0:
            yield block
            return


def _finish(draft: _Draft, row: int, reason: FinishReason, detail: str) -> None:
    run, cols = draft.running(row), draft.cols
    known = known_tokens(run, int(cols.known[row]), cols.tail)
    draft.finished.append(
        Finished(run.seq, run.request, known, reason, detail, int(cols.cached[row]), versions=run.versions)
    )
    draft.pool.drop(run.blocks)
    draft.put(row, None)


def _next_state(draft: _Draft, *, ended: bool) -> EngineState:
    state, order, cols = draft.state, draft.state.order, draft.cols.freeze()
    retabled = state.retabled
    if draft.retabled:
        retabled = (*retabled, *(entry for entry in draft.retabled if cols.seq[entry[0]] >= 0))
    if ended:
        order = order[cols.seq[order] >= 0]
        seal(order)
    return EngineState(
        limits=state.limits,
        step=state.step,
        next_seq=state.next_seq,
        waiting=state.waiting,
        requeued=state.requeued,
        rows=state.rows if draft.rows is None else tuple(draft.rows),
        order=order,
        cols=cols,
        pool=draft.pool.freeze(),
        version=state.version,
        retabled=retabled,
        last=state.last,
        ended=(),
    )
