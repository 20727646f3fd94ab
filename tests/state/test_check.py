"""violations: a sound state has none, and a state corrupted in one place has that one named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from agentinfer.state.blocks import ROOT
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, initial
from agentinfer.state.ids import BlockId, SeqId
from agentinfer.state.log import Queue
from agentinfer.state.sequence import Waiting
from engines import Hand, limits, request


def sound() -> EngineState:
    """Rows 1 and 2 run (a decode and a chunk of a prompt), two blocks are cached, one sequence waits in each queue."""
    hand = Hand.of(limits(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32))
    hand.arrive(request(range(50, 58), 1))
    hand.step()
    hand.arrive(request(range(6), 9))
    hand.step()
    hand.arrive(request(range(20, 34), 3))
    hand.step()
    hand.arrive(request(3, 3))
    waiting = Waiting(SeqId(1000), request(2, 5), 0, request(2, 5).prompt, SeqId(1000))
    return evolve(hand.state, requeued=(waiting,), next_seq=2000)


def column(state: EngineState, name: str, row: int, value: int) -> EngineState:
    """*state* with *value* in one column of one row."""
    changed = getattr(state.cols, name).copy()
    changed[row] = value
    return evolve(state, cols=evolve(state.cols, **{name: changed}))


def record(state: EngineState, row: int, **changes: object) -> EngineState:
    """*state* with another record in one row."""
    rows = list(state.rows)
    rows[row] = evolve(rows[row], **changes)
    return evolve(state, rows=tuple(rows))


def pool(state: EngineState, **changes: object) -> EngineState:
    """*state* with another pool."""
    return evolve(state, pool=evolve(state.pool, **changes))


def refs(state: EngineState, block: int, by: int) -> EngineState:
    """*state* with a reference to *block* too many or too few."""
    changed = state.pool.refs.copy()
    changed[block] += by
    return pool(state, refs=changed)


def table(state: EngineState, row: int) -> tuple[BlockId, ...]:
    run = state.rows[row]
    assert run is not None
    return run.blocks


def cached(state: EngineState) -> list[BlockId]:
    """The cached blocks, next to be evicted first."""
    return [block for block, ticket in state.pool.lru if state.pool.cached.get(block) == ticket]


def other_key(state: EngineState, **changes: object) -> EngineState:
    """*state* in which the first block of row 1 is registered with something else."""
    block = table(state, 1)[0]
    return pool(state, keys=state.pool.keys.insert(block, evolve(state.pool.keys[block], **changes)))


CORRUPT: dict[str, tuple[Callable[[EngineState], EngineState], str]] = {
    "row 0": (lambda s: evolve(s, rows=(s.rows[1], *s.rows[1:])), "row 0, the sink"),
    "rows": (lambda s: evolve(s, rows=(*s.rows, None)), "4 rows for max_num_seqs 2"),
    "order": (lambda s: evolve(s, order=s.order[:1]), "does not list the rows in use"),
    "age": (lambda s: evolve(s, order=s.order[::-1]), "not by age"),
    "seq": (lambda s: column(s, "seq", 1, -1), "Columns.seq marks rows"),
    "other seq": (lambda s: column(s, "seq", 1, 77), "Columns.seq has 77"),
    "wrong row": (lambda s: evolve(s, rows=(None, s.rows[2], s.rows[1])), "names another row"),
    "written": (lambda s: column(s, "written", 1, 30), "written 30"),
    "negative": (lambda s: column(s, "written", 1, -1), "not 0 <= written -1"),
    "computed": (lambda s: column(s, "computed", 1, 30), "computed 30"),
    "known": (lambda s: column(s, "known", 1, 3), "known 3"),
    "promises": (lambda s: column(s, "length", 1, 12), "<= known"),
    "limit": (lambda s: column(s, "limit", 1, 7), "beyond limit 7"),
    "cached": (lambda s: column(s, "cached", 1, 7), "7 tokens cached of a prompt of 6"),
    "token blocks": (lambda s: record(s, 1, tokens=()), "0 full blocks of tokens"),
    "short block": (lambda s: record(s, 1, tokens=((0, 1, 2),)), "full blocks of tokens"),
    "long table": (lambda s: record(s, 1, blocks=(*table(s, 1), BlockId(12))), "3 blocks for"),
    "short table": (lambda s: record(s, 1, blocks=table(s, 1)[:1]), "1 blocks for"),
    "twice": (lambda s: record(s, 1, blocks=(table(s, 1)[0],) * 2), "a block twice in its table"),
    "sink": (lambda s: record(s, 1, blocks=(BlockId(0), table(s, 1)[1])), "or the sink"),
    "tail block": (lambda s: column(s, "tail_block", 1, 12), "tail_block 12"),
    "prompt": (lambda s: record(s, 1, tokens=((9, 1, 2, 3),)), "do not begin with its prompt"),
    "hash": (lambda s: record(s, 1, hashes=(5,)), "not registered under its hash"),
    "hashes": (lambda s: record(s, 1, hashes=(5, 6, 7)), "positions have landed"),
    "content": (lambda s: other_key(s, tokens=(9, 9, 9, 9)), "registered with other content"),
    "salt": (lambda s: other_key(s, salt="x"), "registered with other content"),
    "shared": (lambda s: refs(s, table(s, 1)[-1], 1), "will be written, but is shared"),
    "reference": (lambda s: refs(s, table(s, 1)[0], 1), "2 references, 1 tables"),
    "no reference": (lambda s: refs(s, table(s, 1)[0], -1), "0 references, 1 tables"),
    "sink held": (lambda s: refs(s, 0, 1), "held 1 times"),
    "lost block": (lambda s: pool(s, free=s.pool.free.pop()), "do not add up"),
    "free twice": (lambda s: pool(s, free=s.pool.free.push(s.pool.free.peek())), "do not add up"),
    "free held": (lambda s: pool(s, free=s.pool.free.push(table(s, 1)[0])), "do not add up"),
    "free known": (lambda s: pool(s, free=s.pool.free.push(cached(s)[0])), "a free block is registered"),
    "index": (lambda s: pool(s, index=s.pool.index.insert(77, BlockId(1))), "hashes for"),
    "astray": (
        lambda s: pool(s, index=s.pool.index.insert(s.pool.keys[cached(s)[0]].hash, BlockId(11))),
        "finds 11",
    ),
    "orphan": (lambda s: other_key(s, parent=BlockId(12)), "outlived its parent 12"),
    "unlisted": (lambda s: pool(s, lru=Queue.of()), "does not list the cached blocks"),
    "not cached": (lambda s: pool(s, cached=s.pool.cached.remove(cached(s)[0])), "neither cached nor referenced"),
    "lru order": (lambda s: pool(s, lru=Queue.of([*s.pool.lru][::-1])), "not in order of release"),
    "two places": (lambda s: evolve(s, waiting=s.waiting.push(s.requeued[0])), "in two places"),
    "number": (lambda s: evolve(s, next_seq=3), "never given out"),
    "requeued": (
        lambda s: evolve(s, requeued=(evolve(s.requeued[0], seq=SeqId(1500)), s.requeued[0])),
        "requeued is not by age",
    ),
    "lost prompt": (lambda s: evolve(s, requeued=(evolve(s.requeued[0], tokens=(7,)),)), "lost its prompt"),
}


def test_sound_states_have_no_violations() -> None:
    """Neither an empty engine nor one with everything going on has anything wrong."""
    state = sound()
    assert violations(initial(limits())) == violations(state) == []
    assert len(cached(state)) == 2
    assert all(run is not None for run in state.rows[1:])
    assert table(state, 1)[0] in state.pool.keys


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_state_is_named(case: str) -> None:
    """One thing wrong gives a list that says so in words."""
    corrupt, words = CORRUPT[case]
    found = violations(corrupt(sound()))
    assert any(words in line for line in found), found


def test_a_child_that_would_outlive_its_parent_is_named() -> None:
    """A cached head queued for eviction before its tail is a fault even while both are there."""
    state = sound()
    tail, head = cached(state)
    assert state.pool.keys[tail].parent == head
    assert state.pool.keys[head].parent == ROOT
    tickets = {tail: state.pool.cached[head], head: state.pool.cached[tail]}
    changed = state.pool.cached
    for block, ticket in tickets.items():
        changed = changed.insert(block, ticket)
    state = pool(state, cached=changed, lru=Queue.of(sorted(tickets.items(), key=lambda entry: entry[1])))
    assert any("outlive its parent" in line for line in violations(state))


def test_a_lost_tail_token_is_named() -> None:
    """The last known token must be in the tail, or a decode would be fed another."""
    state = sound()
    tail = np.where(state.cols.tail == 1, 999, state.cols.tail).astype(np.int32)
    assert any(
        "tail" in line or "prompt" in line for line in violations(evolve(state, cols=evolve(state.cols, tail=tail)))
    )
