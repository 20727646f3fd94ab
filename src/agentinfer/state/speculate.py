"""speculate: guesses at a sequence's next tokens, verified in the step that computes the first of them. Pure.

A plan that `schedule` made gives a row one token. `speculate` lets that row compute the guesses that follow, too, and
sample after each of them. `accept` is `commit` for any plan: it keeps the tokens up to the first that is not the one
guessed, and takes the row back to where they end. Knows nothing of where guesses come from.

Of a row that has D drafts from position `known` on:

========= ===================== =====================================
samples   position it is for    counts if
--------- --------------------- -------------------------------------
0         known                 always
j <= D    known + j             samples 0 .. j - 1 are drafts 0 .. j - 1
========= ===================== =====================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from attrs import evolve

from agentinfer.state.blocks import BlockHash, PoolDraft, block_hash
from agentinfer.state.columns import ColumnsDraft
from agentinfer.state.commit import commit
from agentinfer.state.engine import EngineState
from agentinfer.state.ids import I32, Bool, SeqId, cdiv, ints, seal
from agentinfer.state.plan import Output, Plan, Sampled, SamplingColumns, sampled
from agentinfer.state.sequence import holding

Drafts = Mapping[SeqId, Sequence[int]]
"""Guesses at the next tokens of sequences, the very next one first."""


def room(state: EngineState, plan: Plan) -> dict[SeqId, int]:
    """Which sequences of *plan* could use drafts, and how many at most, were budget and blocks without end.

    Those that sample the token after their last known one, and may write a position more. Not those whose logits are
    edited, since what is done to them may depend on every token before. *state*: what came with the plan.
    """
    cols, rows = state.cols, plan.sample_rows[_last_samples(plan)]
    at, row = plan.context[rows], plan.rows[rows]
    most = np.where((at == cols.known[row]) & (cols.edits[row] == 0), cols.limit[row] - 1 - at, 0)
    return {SeqId(seq): n for seq, n in zip(ints(plan.seqs[rows]), ints(most), strict=True) if n > 0}


def speculate(state: EngineState, plan: Plan, drafts: Drafts) -> tuple[EngineState, Plan]:
    """*plan*, with *drafts* to be verified beside; *state*: what `schedule` gave with it. Each gets as many drafts as
    `room`, the budget and the free blocks allow; nobody is preempted for them.

    In the state that comes back such a row has nothing more to do until the plan has landed: its length is what it
    computes. Raises ValueError for a plan that has drafts, and for a draft outside of the vocabulary.
    """
    if plan.drafts:
        raise ValueError(f"step {plan.step} has drafts already")
    widths = _widths(state, plan, drafts) if drafts else []
    if not any(widths):
        return state, plan
    size = state.limits.block_size
    cols, pool, rows = ColumnsDraft(state.cols), PoolDraft(state.pool, state.limits.seed), list(state.rows)
    tables, slots, inputs = list(plan.tables), list[int](), list[int]()
    for row, seq, first, n in zip(ints(plan.rows), ints(plan.seqs), ints(plan.context), widths, strict=True):
        run = rows[row]
        if not n or run is None:
            continue
        if more := cdiv(first + n, size) - len(run.blocks):
            fresh = pool.take(more)
            tables.append((run.row, len(run.blocks), fresh))
            run = rows[row] = holding(run, (*run.blocks, *fresh))
        slots += [run.blocks[p // size] * size + p % size for p in range(first, first + n)]
        inputs += drafts[SeqId(seq)][:n]
        cols.own("computed")[row] = cols.own("length")[row] = first + n
        cols.own("tail_block")[row] = run.blocks[-1]
    wide = _widened(plan, np.array(widths, np.int32), slots, inputs)
    wide = evolve(wide, tables=tuple(tables))
    return evolve(state, rows=tuple(rows), cols=cols.freeze(), pool=pool.freeze(), last=wide), wide


class Guess(NamedTuple):
    """Where a plan has the drafts of one row."""

    row: int
    """Which of the plan's rows."""
    width: int
    """D of them, at least one."""
    first: int
    """Flat position of the first."""
    sample: int
    """The sample that is to be the first, of D + 1 in a line."""


def guesses(plan: Plan) -> list[Guess]:
    """Where the drafts of *plan* are, a row each."""
    if not plan.drafts:
        return []
    first = np.cumsum(plan.count) - np.array(plan.drafts)
    sample = np.searchsorted(plan.samples, first - 1)
    return [Guess(i, n, int(first[i]), int(sample[i])) for i, n in enumerate(plan.drafts) if n]


def drafts_of(plan: Plan) -> tuple[tuple[SeqId, tuple[int, ...]], ...]:
    """The drafts that *plan* verifies, a sequence each: what `speculate` needs to make the same plan again."""
    return tuple(
        (SeqId(int(plan.seqs[guess.row])), tuple(ints(plan.inputs[guess.first : guess.first + guess.width])))
        for guess in guesses(plan)
    )


def runs_of(plan: Plan, sampled: Sampled) -> I32:
    """[R] how many tokens of each row count, if it samples: those that are as drafted, and one more."""
    runs = np.ones(len(plan.rows), np.int32)
    for row, n, first, sample in guesses(plan):
        right = sampled.tokens[sample : sample + n] == plan.inputs[first : first + n]
        right &= sampled.ok[sample : sample + n]
        runs[row] += n if right.all() else int(right.argmin())
    return runs


def accept(
    state: EngineState, plan: Plan, sampled: Sampled, hasher: BlockHash = block_hash
) -> tuple[EngineState, Output]:
    """`commit` for a plan with drafts or without: what a row sampled counts up to the first token that differs from
    its draft, that one included.

    Each of them is committed as the step that would have sampled it alone, so that ends, limits and the prefix cache
    are what they are without drafts. Other rows are not touched. Raises ValueError as `commit` does.
    """
    if not plan.drafts or len(sampled.tokens) != len(plan.samples):
        return commit(state, plan, sampled, hasher)
    runs, ahead, outputs = runs_of(plan, sampled), _ahead(plan), list[Output]()
    for j in range(int(runs.max())):
        which = (ahead == j) & (j < runs[plan.sample_rows])
        part = _alone(plan, j, which, runs)
        state, output = commit(state, part, _taken(part, sampled, which), hasher)
        outputs.append(output)
    return _taken_back(state, plan), _joined(outputs)


def _last_samples(plan: Plan) -> Bool:
    """[S] whether the sample is that of its row's last position."""
    return plan.samples == (np.cumsum(plan.count) - 1)[plan.sample_rows]


def _widths(state: EngineState, plan: Plan, drafts: Drafts) -> list[int]:
    """[R] drafts that each row of *plan* gets."""
    limits, open_ = state.limits, room(state, plan)
    budget, free = limits.max_num_batched_tokens - len(plan.slots), state.pool.num_available
    widths: list[int] = []
    for row, seq, first in zip(ints(plan.rows), ints(plan.seqs), ints(plan.context), strict=True):
        given, run = drafts.get(SeqId(seq), ()), state.rows[row]
        for token in given:
            if not 0 <= token < limits.vocab_size:
                raise ValueError(f"a draft of sequence {seq} is token {token}; the vocabulary has {limits.vocab_size}")
        held = 0 if run is None else len(run.blocks)
        space = (held + free) * limits.block_size - first
        n = min(len(given), open_.get(SeqId(seq), 0), budget, space)
        widths.append(n)
        budget -= n
        free -= cdiv(first + n, limits.block_size) - held
    return widths


def _widened(plan: Plan, widths: I32, slots: list[int], inputs: list[int]) -> Plan:
    """*plan*, whose row i computes widths[i] positions more, with *slots* and *inputs*, and samples after each."""
    at = np.repeat(np.cumsum(plan.count), widths)
    count, context = plan.count + widths, plan.context + widths
    times = np.where(_last_samples(plan), 1 + widths[plan.sample_rows], np.int32(1))
    ahead: I32 = np.arange(times.sum(), dtype=np.int32) - np.repeat(np.cumsum(times, dtype=np.int32) - times, times)
    shift = np.cumsum(widths, dtype=np.int32) - widths
    samples = np.repeat(plan.samples + shift[plan.sample_rows], times) + ahead
    place = np.cumsum(times) - times
    wide = evolve(
        plan,
        count=count,
        context=context,
        slots=np.insert(plan.slots, at, slots),
        inputs=np.insert(plan.inputs, at, np.array(inputs, np.int32)),
        samples=samples,
        sample_rows=np.repeat(plan.sample_rows, times),
        sampling=_sampling(plan.sampling, times, place, ahead),
        edits=tuple(evolve(edit, sample=int(place[edit.sample])) for edit in plan.edits),
        logprobs=None if plan.logprobs is None else np.repeat(plan.logprobs, times),
        scored=plan.scored and evolve(plan.scored, samples=plan.scored.samples + shift[plan.scored.rows]),
        drafts=tuple(ints(widths)),
    )
    seal(count, context, wide.slots, wide.inputs, samples, wide.sample_rows)
    return wide


def _sampling(before: SamplingColumns, times: I32, place: I32, ahead: I32) -> SamplingColumns:
    """*before*, each sample of which is there so many *times* from *place* on, for one output index after the other."""
    params, index = np.repeat(before.params, times), np.repeat(before.index, times) + ahead
    banned = tuple(
        (int(place[i]) + j, ids)
        for i, ids in before.banned
        for j in range(int(times[i]))
        if before.params["prompt"][i] + before.index[i] + j < before.params["floor"][i]
    )
    seal(params, index)
    return SamplingColumns(params, index, banned)


def _ahead(plan: Plan) -> I32:
    """[S] how many drafts of its row come before each sample."""
    first = np.cumsum(plan.count) - 1 - np.array(plan.drafts)
    return np.maximum(plan.samples - first[plan.sample_rows], 0)


def _alone(plan: Plan, j: int, which: Bool, runs: I32) -> Plan:
    """The plan that would have sampled token *j* of each row that has one, with the samples *which* of *plan*."""
    mine = np.ones(len(runs), np.bool_) if j == 0 else runs > j
    context = (plan.context - np.array(plan.drafts, np.int32))[mine] + j
    count = np.ones(len(context), np.int32) if j else plan.count - np.array(plan.drafts, np.int32)
    samples, place = np.flatnonzero(which).astype(np.int32), np.cumsum(mine, dtype=np.int32) - 1
    return evolve(
        plan,
        rows=plan.rows[mine],
        seqs=plan.seqs[mine],
        start=context - count,
        count=count,
        context=context,
        samples=samples,
        sample_rows=place[plan.sample_rows[which]],
        logprobs=None if plan.logprobs is None else plan.logprobs[which],
        scored=None if j else plan.scored,
        drafts=(),
    )


def _taken(part: Plan, whole: Sampled, which: Bool) -> Sampled:
    logprobs = whole.logprobs and tuple(compress(whole.logprobs, which))
    return sampled(part, whole.tokens[which], whole.ok[which], logprobs, whole.scored if part.scored else None)


def _taken_back(state: EngineState, plan: Plan) -> EngineState:
    """*state*, in which the rows that had drafts have computed what they know, and hold no block beyond that."""
    size = state.limits.block_size
    cols, pool, runs = ColumnsDraft(state.cols), PoolDraft(state.pool, state.limits.seed), list(state.rows)
    drafted = np.flatnonzero(plan.drafts)
    rows, seqs, had = plan.rows[drafted], plan.seqs[drafted], -(-plan.context[drafted] // size)
    mine = (cols.seq[rows] == seqs) & (cols.born[rows] <= plan.step)
    rows, had = rows[mine], had[mine]
    known = cols.known[rows]
    cols.own("computed")[rows], cols.own("length")[rows] = known - 1, known
    blocks = -(-(known - 1) // size)
    for row, n in zip(ints(rows[blocks < had]), ints(blocks[blocks < had]), strict=True):
        run = runs[row]
        if run is not None:
            pool.drop(run.blocks[n:])
            runs[row] = holding(run, run.blocks[:n])
            cols.own("tail_block")[row] = run.blocks[n - 1]
    return evolve(state, rows=tuple(runs), cols=cols.freeze(), pool=pool.freeze())


def _joined(outputs: Sequence[Output]) -> Output:
    """*outputs* of one step as one: the tokens of a sequence in their order."""
    seqs, tokens = (np.concatenate([getattr(x, name) for x in outputs]) for name in ("seqs", "tokens"))
    seal(seqs, tokens)
    finished = tuple(done for x in outputs for done in x.finished)
    logprobs = None
    if outputs[0].logprobs is not None:
        logprobs = tuple(one for x in outputs for one in x.logprobs or ())
    return Output(outputs[0].step, seqs, tokens, finished, logprobs, outputs[0].prompt_logprobs)
