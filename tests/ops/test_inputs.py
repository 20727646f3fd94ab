"""Staging: a plan as the device sees it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentinfer.errors import StaleHandle
from agentinfer.ops import kv as kvs
from agentinfer.ops.inputs import Memo, by_hand, check_tables, host_rows, ranges, remember, stage, tables_of
from agentinfer.ops.kv import KvCache
from agentinfer.state.columns import PARAMS
from agentinfer.state.plan import Plan, SamplingColumns

CPU = torch.device("cpu")
ROWS, COLUMNS = 6, 8


def pool(block_size: int = 4, step: int = -1) -> KvCache:
    return kvs.holding(kvs.allocate([kvs.gqa(block_size, 1, 2, torch.float32)], 40, ROWS, COLUMNS, CPU), step)


def a_plan(rows, start, count, slots, inputs, samples, sample_rows, tables, base=-1, copies=()) -> Plan:
    def i32(x) -> np.ndarray:
        return np.array(x, np.int32)

    return Plan(
        step=7,
        base=base,
        rows=i32(rows),
        seqs=i32(rows),
        start=i32(start),
        count=i32(count),
        context=i32(start) + i32(count),
        slots=np.array(slots, np.int64),
        inputs=i32(inputs),
        samples=i32(samples),
        sample_rows=i32(sample_rows),
        sampling=SamplingColumns(np.zeros(len(samples), PARAMS), np.zeros(len(samples), np.int32), ()),
        tables=tables,
        copies=copies,
        preempted=(),
    )


@st.composite
def programs(draw: st.DrawFn):
    """A block size and rows of (row, start, count, blocks, tokens with -1 for those in flight, how many samples)."""
    size = draw(st.sampled_from([1, 2, 4]))
    places = draw(st.lists(st.integers(1, ROWS), min_size=1, max_size=ROWS, unique=True))
    blocks = draw(st.permutations(range(1, 41)))
    rows = []
    for row in places:
        context = draw(st.integers(1, COLUMNS * size))
        count = draw(st.integers(1, context))
        held, blocks = blocks[: -(-context // size)], blocks[-(-context // size) :]
        if len(held) < -(-context // size):
            break
        tokens = [draw(st.integers(-1, 50)) for _ in range(count)]
        rows.append((row, context - count, count, held, tokens, draw(st.integers(0, count))))
    return size, rows


@settings(max_examples=60, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_stage_says_what_a_loop_over_positions_says(program, random) -> None:
    """Ids, positions, slots, tables, samples and the last tokens equal those of a naive loop, whatever the rows and
    table deltas.
    """
    size, rows = program
    ids, positions, slots, samples, owners, tables = [], [], [], [], [], []
    last = torch.arange(100, 101 + ROWS)
    for i, (row, start, count, blocks, tokens, sampled) in enumerate(rows):
        samples += [len(ids) + count - sampled + j for j in range(sampled)]
        owners += [i] * sampled
        for j, token in enumerate(tokens):
            at = start + j
            ids.append(100 + row if token < 0 else token)
            positions.append(at)
            slots.append(blocks[at // size] * size + at % size)
        cut = random.randint(0, len(blocks))
        tables += [(row, 0, (39,) * cut), (row, cut, tuple(blocks[cut:])), (row, 0, tuple(blocks[:cut]))]
    flat_inputs = [t for row in rows for t in row[4]]
    plan = a_plan(
        [r[0] for r in rows],
        [r[1] for r in rows],
        [r[2] for r in rows],
        slots,
        flat_inputs,
        samples,
        owners,
        tuple(tables),
    )
    x, kv = stage(plan, pool(size), last)
    assert x.ids.tolist() == ids
    assert x.positions.tolist() == positions
    assert x.slots.tolist() == slots
    assert x.rows.tolist() == [r[0] for r in rows]
    assert x.context.tolist() == [r[1] + r[2] for r in rows] == list(host_rows(x).context)
    assert x.cu_seqlens_q.tolist() == [sum(r[2] for r in rows[:i]) for i in range(len(rows) + 1)]
    assert (x.max_query, x.max_context) == (max(r[2] for r in rows), max(r[1] + r[2] for r in rows))
    assert x.samples.tolist() == samples
    for i, (row, _, _, blocks, _, _) in enumerate(rows):
        assert kv.table[row, : len(blocks)].tolist() == blocks
        assert tables_of(x, size)[i, : len(blocks)].tolist() == blocks
    for tensor, dtype in (
        (x.ids, torch.int64),
        (x.slots, torch.int64),
        (x.table, torch.int32),
        (x.cu_seqlens_q, torch.int32),
        (x.rows, torch.int64),
    ):
        assert tensor.dtype == dtype
    assert kv.step == 7
    tokens = torch.arange(len(samples)) + 1000
    after = remember(last.clone(), x, tokens)
    want = last.tolist()
    for i, owner in enumerate(owners):
        want[rows[owner][0]] = 1000 + i
    assert after.tolist() == want


def decode(base: int, tables=(), copies=()) -> Plan:
    return a_plan([1], [4], [1], [8], [-1], [0], [0], tables, base, copies)


def test_a_plan_that_extends_other_tables_is_refused() -> None:
    """A plan whose base is not the step that the device holds raises StaleHandle and leaves the handle live; a complete
    one never does.
    """
    kv = pool(step=3)
    last = torch.zeros(ROWS + 1, dtype=torch.int64)
    with pytest.raises(StaleHandle, match="tables of step 2, the device holds those of step 3"):
        stage(decode(2), kv, last)
    kv.check("me")
    _, after = stage(decode(3), kv, last)
    assert after.step == 7
    with pytest.raises(StaleHandle, match="given to stage"):
        stage(decode(-1), kv, last)
    _, after = stage(decode(-1), after, last)
    assert after.step == 7


def test_table_entries_stay_from_plan_to_plan() -> None:
    """A plan brings only new entries; the old ones are still there."""
    last = torch.zeros(ROWS + 1, dtype=torch.int64)
    _, kv = stage(a_plan([1], [0], [4], range(20, 24), [1, 2, 3, 4], [3], [0], ((1, 0, (5,)),)), pool(), last)
    x, kv = stage(decode(7, ((1, 1, (2,)),)), kv, last)
    assert tables_of(x, kv.block_size).tolist() == [[5, 2]]
    assert kv.table[1, :2].tolist() == [5, 2]


def test_block_copies_are_done_before_the_step() -> None:
    """The copies of a plan have happened when its Inputs are returned."""
    kv = pool()
    kv.layers[0].k[5] = 1.5
    _, kv = stage(decode(-1, copies=((5, 6),)), kv, torch.zeros(ROWS + 1, dtype=torch.int32))
    assert bool((kv.layers[0].k[6] == 1.5).all())


@pytest.mark.parametrize("context", [8, 9])
def test_a_context_past_its_table_is_refused_before_launch(context: int) -> None:
    """KV-12: a table of 2 blocks of 4 holds 8 keys; 9, or 8 and one appended, raise and leave the handle live."""
    kv = kvs.allocate([kvs.gqa(4, 1, 2, torch.float32)], 9, 2, 2, CPU)
    last = torch.zeros(3, dtype=torch.int64)
    plan = a_plan([1], [context - 1], [1], [4], [1], [0], [0], ((1, 0, (1, 2)),))
    if context == 8:
        _, kv = stage(plan, kv, last)
        plan = a_plan([1], [8], [1], [4], [1], [0], [0], ())
    with pytest.raises(ValueError, match="attends to 9 keys, its block table holds 2 blocks of 4: 8"):
        stage(plan, kv, last)
    with pytest.raises(ValueError, match="needs 3 table entries"):
        stage(a_plan([1], [7], [1], [4], [1], [0], [0], ((1, 1, (1, 2)),)), kv, last)
    kv.check("me")


def test_check_tables_takes_lists_and_nothing() -> None:
    """No row at all fits any table."""
    check_tables([], 0, 4)
    check_tables([8, 3], 2, 4)
    with pytest.raises(ValueError, match="9 keys"):
        check_tables([8, 9], 2, 4)


def test_ranges() -> None:
    """Counted runs one after the other, empty ones too."""
    assert ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert ranges(np.array([], np.int32), np.array([], np.int32)).tolist() == []


def test_by_hand_lays_rows_out_as_a_plan_would() -> None:
    """Rows given by hand get the slots of their blocks, and sample last positions or all."""
    x, kv = by_hand(pool(), [[7, 8, 9], [4]], [3, 0], [[5, 2], [9]])
    assert x.ids.tolist() == [7, 8, 9, 4]
    assert x.slots.tolist() == [23, 8, 9, 36]
    assert x.samples.tolist() == [2, 3]
    assert tables_of(x, kv.block_size).tolist() == [[5, 2], [9, 0]]
    x, kv = by_hand(kv, [[7, 8, 9], [4]], [3, 0], [[5, 2], [9]], rows=[4, 2], every=True)
    assert x.samples.tolist() == [0, 1, 2, 3]
    assert x.rows.tolist() == [4, 2]
    assert x.last_samples.tolist() == [2, 3]


def test_memo_computes_once_for_an_owner() -> None:
    """A value is made once a key and owner; another owner gets its own."""
    memo, made = Memo(), []
    one, two = object(), object()

    def make() -> int:
        made.append(1)
        return len(made)

    assert [
        memo.once("a", one, make),
        memo.once("a", one, make),
        memo.once("b", one, make),
        memo.once("a", two, make),
    ] == [1, 1, 2, 3]
