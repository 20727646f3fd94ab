"""schedule: decide the next forward pass. Pure.

Every row's `computed` catches up with its `length`; a decode is the case where it is one behind, and there is
no other difference between prefill, a chunk, a resumed sequence and a decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import evolve

from agentinfer.state.admit import affordable, blocks_wanted, claim, early, limit_of, parent_of, promised, stop_ids
from agentinfer.state.blocks import ROOT, BlockHash, PoolDraft, block_hash
from agentinfer.state.columns import PARAMS, ColumnsDraft
from agentinfer.state.engine import EngineState, find_waiting, known_tokens
from agentinfer.state.ids import I32, BlockId, Row, SeqId, cdiv, every, ints, seal, total
from agentinfer.state.layout import edits_of, layout, sampling_of
from agentinfer.state.log import Queue
from agentinfer.state.plan import Plan, TableEntries, Told
from agentinfer.state.policy import NOBODY, Policy, Turn, needs, queue, reserve, throughput
from agentinfer.state.request import edits_logits
from agentinfer.state.sequence import Running, Waiting, again, holding
from agentinfer.state.wanted import fewer, logprobs_wanted, most_scored, scored_by, scored_of, within


def schedule(
    state: EngineState, policy: Policy = throughput, hasher: BlockHash = block_hash
) -> tuple[EngineState, Plan | None]:
    """Plan one step, by the first of the policy's turns that gives work; None: nothing to do now.

    The state that comes back counts the planned positions as computed and the sampled tokens as promised,
    so that the step after can be planned before this one has landed. Without a plan it is *state* itself.
    """
    ours = policy is throughput or policy is reserve
    for proposed in policy(state):
        turn = proposed if ours else _checked(state, proposed)
        draft = _Draft(state, hasher)
        rows, count, positions = _serve(draft, turn)
        entered = _admit(draft, turn, rows, count, positions) if not draft.preempted else []
        start = state.cols.computed.take(rows)
        if entered:
            new, first, length = (np.array(column, np.int32) for column in zip(*entered, strict=True))
            rows, start = np.concatenate([rows, new]), np.concatenate([start, first])
            count, positions = np.concatenate([count, length]), positions + total(length)
        if positions:
            return _finish(draft, rows, count, start, positions, turn)
        if draft.preempted:
            return _go_on(draft, policy, hasher)
    return state, None


def _go_on(draft: _Draft, policy: Policy, hasher: BlockHash) -> tuple[EngineState, Plan | None]:
    """The plan of a step in which everybody whose turn it was made room for older ones and is left with nothing.

    They are preempted all the same, or it would be their turn for ever; the others are served over their blocks.
    """
    gone = tuple(waiting.seq for waiting in draft.preempted)
    rest = _rest(draft, None, step=draft.state.step, retabled=draft.state.retabled)

    def nobody_enters(state: EngineState) -> Iterator[Turn]:
        return (evolve(turn, admit=()) for turn in policy(state))

    state, plan = schedule(rest, nobody_enters, hasher)
    if plan is None:
        return draft.state, None
    plan = evolve(plan, preempted=(*gone, *plan.preempted))
    return evolve(state, last=plan), plan


def _checked(state: EngineState, turn: Turn) -> Turn:
    """What schedule can follow of the *turn* of a policy that it does not know: counts that rows need, who waits.

    Raises ValueError if it names a row that is not in use, or one twice.
    """
    rows, count = np.array(turn.rows, np.int32), np.array(turn.count, np.int32)
    victims = np.array(turn.victims, np.int32)
    for name, column in (("rows", rows), ("victims", victims)):
        if len(set(ints(column))) != len(column) or not set(ints(column)) <= set(ints(state.order)):
            raise ValueError(f"the policy's {name} {ints(column)} are not distinct rows in use {ints(state.order)}")
    if len(count) != len(rows):
        raise ValueError(f"the policy gave {len(count)} counts for {len(rows)} rows")
    need = dict(zip(ints(state.order), ints(needs(state)), strict=True))
    most = np.array([need[row] for row in ints(rows)], np.int32)
    queued = {id(waiting) for waiting in queue(state)}
    admit = {id(waiting): waiting for waiting in turn.admit if id(waiting) in queued}
    return Turn(rows, np.clip(count, 0, most), admit.values(), victims, turn.reserve, turn.short)


class _Draft:
    """What one call of schedule builds. Mutable on purpose; it never escapes."""

    def __init__(self, state: EngineState, hasher: BlockHash) -> None:
        self.state = state
        self.limits = state.limits
        self.cols = ColumnsDraft(state.cols)
        self.pool = PoolDraft(state.pool, state.limits.seed, hasher)
        self.rows: Sequence[Running | None] = state.rows
        self.order = state.order
        self.preempted: list[Waiting] = []
        self.admitted: list[Waiting] = []
        self.room = most_scored(state.limits)
        self.tables: list[TableEntries] = list(state.retabled)
        self.told: list[Told] = []
        self.copies: list[tuple[BlockId, BlockId]] = []

    def put(self, row: int, run: Running | None) -> None:
        """Set the record of *row*."""
        if not isinstance(self.rows, list):
            self.rows = list(self.rows)
        self.rows[row] = run

    def running(self, row: int) -> Running:
        """The record of a row in use."""
        run = self.rows[row]
        if run is None:
            raise IndexError(f"row {row} is not in use")
        return run


def _serve(draft: _Draft, turn: Turn) -> tuple[I32, I32, int]:
    """The running rows of *turn* and their counts, with blocks for all of it, after preemptions if need be.

    The third value is the sum of the counts.
    """
    rows, count, budget = turn.rows, turn.count, draft.limits.max_num_batched_tokens
    served = np.count_nonzero(count)
    if served != len(rows):
        rows, count = rows[count > 0], count[count > 0]
    if not served:
        return rows[:0], count[:0], 0
    asked = total(count)
    if asked > budget:
        count = np.diff(np.minimum(np.cumsum(count), budget), prepend=0).astype(np.int32)
        rows, count, asked = rows[count > 0], count[count > 0], budget
    judged, draft.room = within(draft.cols, rows, count, draft.room)
    if judged is not count:
        rows, count = rows[judged > 0], judged[judged > 0]
        asked = total(count)
    size = draft.limits.block_size
    at = draft.state.cols.computed.take(rows) % size
    if asked > len(rows):
        growing = np.flatnonzero((at == 0) | (at + count > size))
    else:
        growing = NOBODY if every(at) else np.flatnonzero(at == 0)
    if len(growing):
        start = draft.state.cols.computed[rows[growing]]
        extra = -(-(start + count[growing]) // size) - -(-start // size)
        grow = dict(zip(ints(rows[growing]), ints(extra), strict=True))
        gone = _make_room(draft, grow, turn.victims)
        for row, n in grow.items():
            _extend(draft, row, draft.pool.take(n))
        if gone:
            stay = ~np.isin(rows, gone)
            rows, count = rows[stay], count[stay]
            asked = total(count)
    return rows, count, asked


def _make_room(draft: _Draft, grow: dict[int, int], victims: I32) -> list[int]:
    """Preempt *victims* until the blocks of *grow* can be had; who still can not have them sits this step out.

    Rows that lose their turn leave *grow*; they are returned.
    """
    short, gone = sum(grow.values()), list[int]()
    for row in ints(victims):
        if short <= draft.pool.num_available:
            break
        short -= grow.pop(row, 0)
        _preempt(draft, draft.running(row))
        gone.append(row)
    while short > draft.pool.num_available:
        row, n = grow.popitem()
        short -= n
        gone.append(row)
    if draft.preempted:
        draft.order = draft.order[draft.cols.seq[draft.order] >= 0]
    return gone


def _preempt(draft: _Draft, run: Running) -> None:
    """Send *run* back to wait; its KV is forgotten, but for what the prefix cache keeps."""
    cols = draft.state.cols
    tokens = known_tokens(run, int(cols.known[run.row]), cols.tail)
    draft.preempted.append(again(run, tokens, int(cols.cached[run.row])))
    draft.pool.drop(run.blocks)
    draft.cols.clear(run.row)
    draft.put(run.row, None)


def _extend(draft: _Draft, row: int, blocks: tuple[BlockId, ...]) -> None:
    run = draft.running(row)
    draft.put(row, holding(run, run.blocks + blocks))
    draft.tables.append((run.row, len(run.blocks), blocks))
    draft.cols.own("tail_block")[row] = blocks[-1]


def _admit(draft: _Draft, turn: Turn, rows: I32, count: I32, positions: int) -> list[tuple[int, int, int]]:
    """Admit from the turn's queue while there is a row, a budget and room: (row, start, count) of each.

    *rows* have *count* each of the step's positions already, *positions* in all.
    """
    budget = draft.limits.max_num_batched_tokens - positions
    vacant = draft.limits.max_num_seqs - len(draft.order)
    entered: list[tuple[int, int, int]] = []
    if budget <= 0 or vacant <= 0:
        return entered
    free: Iterator[int] | None = None
    spoken_for = 0
    for waiting in turn.admit:
        if free is None:
            free = iter(ints(np.flatnonzero(draft.cols.seq < 0)[1:]))
            if turn.reserve:
                draft.cols.own("computed")[rows] = draft.state.cols.computed[rows] + count
                spoken_for = promised(draft.state, draft.cols, ints(draft.order))
        if budget <= 0 or len(entered) >= vacant:
            break
        if waiting.parent != waiting.seq:
            entering = any(other.seq == waiting.parent for other in draft.admitted)
            if entering or early(draft.state, waiting):
                if turn.reserve and (entering or find_waiting(draft.state, waiting.parent) is None):
                    break  # its blocks are spoken for: nobody overtakes it
                continue
        run, start, n = _enter(draft, waiting, Row(next(free)), budget, spoken_for, reserve=turn.reserve)
        if run is None:
            break
        if turn.reserve:
            spoken_for += cdiv(int(draft.cols.limit[run.row]) - 1, draft.limits.block_size) - len(run.blocks)
        budget -= n
        entered.append((run.row, start, n))
        draft.admitted.append(waiting)
    return entered


def _enter(
    draft: _Draft, waiting: Waiting, row: Row, budget: int, spoken_for: int, *, reserve: bool
) -> tuple[Running | None, int, int]:
    """Give *waiting* the *row* and blocks for its first positions, if it fits."""
    limits, pool = draft.limits, draft.pool
    had = claim(limits, pool, waiting, *parent_of(draft.state, waiting))
    if not affordable(pool, had, blocks_wanted(limits, waiting, reserve=reserve), spoken_for):
        return None, 0, 0
    n = min(len(waiting.tokens) - had.computed, budget)
    n, draft.room = fewer(had.computed, n, scored_of(waiting.request), draft.room)
    if not n:
        return None, 0, 0
    if had.shared:
        pool.hold(had.shared)
    fresh = pool.take(cdiv(had.computed + n, limits.block_size) - len(had.shared))
    if had.source != ROOT:
        draft.copies.append((had.source, fresh[0]))
    size, tokens = limits.block_size, waiting.tokens
    full = len(tokens) // size * size
    run = Running(
        seq=waiting.seq,
        request=waiting.request,
        seed=waiting.seed,
        row=row,
        tokens=tuple(tokens[i : i + size] for i in range(0, full, size)),
        blocks=(*had.shared, *fresh),
        hashes=had.hashes,
        versions=waiting.versions,
    )
    draft.put(row, run)
    draft.tables.append((row, 0, run.blocks))
    if edits_logits(waiting.request.params):
        draft.told.append(Told(row, waiting.request, tokens))
    _write_columns(draft, run, waiting, had.computed)
    return run, had.computed, n


def _write_columns(draft: _Draft, run: Running, waiting: Waiting, computed: int) -> None:
    """The numbers of a sequence that has just been admitted."""
    cols, row, tokens, request = draft.cols, run.row, waiting.tokens, waiting.request
    size, params = draft.limits.block_size, request.params
    prompt = len(request.prompt)
    stop = stop_ids(draft.limits, params)
    if len(stop) > cols.stop.shape[1]:
        wider = np.full((len(cols.seq), len(stop)), -1, np.int32)
        wider[:, : cols.stop.shape[1]] = cols.stop
        cols.adopt("stop", wider)
    cols.own("stop")[row] = -1
    cols.stop[row, : len(stop)] = sorted(stop)
    cols.own("seq")[row] = run.seq
    cols.own("length")[row] = len(tokens)
    cols.own("known")[row] = len(tokens)
    cols.own("computed")[row] = computed
    cols.own("written")[row] = computed
    cols.own("limit")[row] = limit_of(draft.limits, request)
    cols.own("turn")[row] = 0
    cols.own("born")[row] = draft.state.step
    cols.own("edits")[row] = edits_logits(params)
    cols.own("logprobs")[row] = -1 if params.logprobs is None else params.logprobs
    cols.own("scored")[row] = scored_of(request)
    cols.own("cached")[row] = min(computed, prompt) if waiting.cached < 0 else waiting.cached
    cols.own("tail_block")[row] = run.blocks[-1]
    tail = cols.own("tail")
    full = len(tokens) // size * size
    tail[row] = 0
    tail[row, : len(tokens) - full] = tokens[full:]
    tail[row, (len(tokens) - 1) % size] = tokens[-1]
    fields = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        run.seed,
        prompt,
        prompt + params.min_tokens,
    )
    cols.own("params").view(PARAMS)[row] = fields


def _finish(draft: _Draft, rows: I32, count: I32, start: I32, positions: int, turn: Turn) -> tuple[EngineState, Plan]:
    """The plan of *rows* over *positions* in all, and the state in which it is under way."""
    state, cols = draft.state, draft.cols
    end = start + count
    slots, inputs, last = layout(cols, draft.running, rows, start, count, positions)
    cols.own("computed")[rows] = end
    before = _same_rows(state.last, rows)
    steady = before is not None and len(slots) == len(rows)
    if steady or every(sampling := end == cols.length.take(rows)):
        sample_rows, sampled, length = last if steady else np.arange(len(rows), dtype=np.int32), rows, end
    else:
        sample_rows = np.flatnonzero(sampling).astype(np.int32)
        sampled, last, length = rows[sample_rows], last[sample_rows], end[sample_rows]
    cols.own("length")[sampled] = length + 1  # the token this step will sample, promised
    if turn.short:
        cols.own("turn")[rows] = state.step + 1
    plan = Plan(
        step=state.step,
        base=state.step - 1,
        rows=rows,
        seqs=cols.seq.take(rows) if before is None else before.seqs,
        start=start,
        count=count,
        context=end,
        slots=slots,
        inputs=inputs,
        samples=last,
        sample_rows=sample_rows,
        sampling=sampling_of(cols, sampled, length, before.sampling if before is not None and steady else None),
        tables=tuple(draft.tables),
        copies=tuple(draft.copies),
        preempted=tuple(w.seq for w in draft.preempted),
        edits=before.edits if before is not None and steady else edits_of(cols, draft.running, sampled),
        told=tuple(draft.told),
        logprobs=before.logprobs if before is not None and steady else logprobs_wanted(cols, sampled),
        scored=None if steady else scored_by(cols, rows, start, end, draft.running),
    )
    seal(rows, plan.seqs, start, count, end, slots, inputs, last, sample_rows)
    return _rest(draft, plan, step=state.step + 1, retabled=()), plan


def _same_rows(last: Plan | None, rows: I32) -> Plan | None:
    """The plan before, if it was a decode of the very same rows, each of which sampled.

    The column of rows is the state's own `order`: had anybody come or gone, it would be another one.
    """
    if last is not None and last.rows is rows and len(last.slots) == len(last.samples) == len(rows):
        return last
    return None


def _rest(draft: _Draft, last: Plan | None, *, step: int, retabled: tuple[TableEntries, ...]) -> EngineState:
    """The state that *draft* has come to."""
    state, order = draft.state, draft.order
    waiting, requeued = state.waiting, state.requeued
    if draft.admitted or draft.preempted:
        rows = [run.row for run in draft.rows if run is not None]
        order = np.array(sorted(rows, key=lambda row: draft.cols.seq[row]), np.int32)
        waiting, requeued = _leave_queues(draft)
    seal(order)
    return EngineState(
        limits=state.limits,
        step=step,
        next_seq=state.next_seq,
        waiting=waiting,
        requeued=requeued,
        rows=tuple(draft.rows),
        order=order,
        cols=draft.cols.freeze(),
        pool=draft.pool.freeze(),
        version=state.version,
        retabled=retabled,
        last=last,
        ended=state.ended,
    )


def _leave_queues(draft: _Draft) -> tuple[Queue[Waiting], tuple[Waiting, ...]]:
    """The queues without who was admitted, and with who was preempted in front, by age."""
    admitted = {w.seq for w in draft.admitted}
    requeued = [w for w in draft.state.requeued if w.seq not in admitted]
    left = len(admitted) - (len(draft.state.requeued) - len(requeued))
    waiting = draft.state.waiting
    while left and waiting.peek().seq in admitted:
        waiting, left = waiting.pop(), left - 1
    if left:
        waiting = Queue[Waiting].of(w for w in waiting if w.seq not in admitted)
    return waiting, tuple(sorted([*draft.preempted, *requeued], key=lambda w: w.seq))


def full_tables(state: EngineState) -> tuple[TableEntries, ...]:
    """Every running row's whole block table, as the entries of a plan."""
    return tuple((run.row, 0, run.blocks) for run in state.rows if run is not None)


def all_told(state: EngineState) -> tuple[Told, ...]:
    """What a device that knows no row has to know of the running rows whose logits are edited."""
    return tuple(
        Told(run.row, run.request, known_tokens(run, int(state.cols.known[run.row]), state.cols.tail))
        for run in state.rows
        if run is not None and state.cols.edits[run.row]
    )


def rebase(state: EngineState, plan: Plan, base: int) -> Plan:
    """*plan* for a device that holds the tables of plan *base*. *state*: the one that came with the plan; if the device
    holds those of another plan than this one extends, no step is in flight.
    """
    return plan if base == plan.base else evolve(plan, base=-1, tables=full_tables(state), told=all_told(state))


def scheduled(plan: Plan) -> dict[SeqId, tuple[int, int]]:
    """The range of positions [first, last) that *plan* computes of each sequence."""
    ranges = zip(ints(plan.seqs), ints(plan.start), ints(plan.context), strict=True)
    return {SeqId(seq): (first, last) for seq, first, last in ranges}
