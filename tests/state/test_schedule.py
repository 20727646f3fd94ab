"""schedule: which positions a step computes, with how many blocks, and what the plan says of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.errors import InvalidSetting
from agentinfer.state.engine import digest, initial
from agentinfer.state.ids import cdiv, ints
from agentinfer.state.policy import reserve, throughput
from agentinfer.state.schedule import full_tables, rebase, schedule, scheduled
from agentinfer.testing.books import same_plan
from engines import BOTH, Hand, blocks_of, drive, in_use, limits, ranges, request, sampling_steps

CHUNKS = {  # (prompt, budget, cached): (start, count, sampled) of each step until it samples
    (10, 4, 0): [(0, 4, False), (4, 4, False), (8, 2, True)],
    (8, 4, 0): [(0, 4, False), (4, 4, True)],
    (9, 4, 0): [(0, 4, False), (4, 4, False), (8, 1, True)],
    (9, 4, 8): [(8, 1, True)],
    (5, 5, 0): [(0, 5, True)],
    (6, 5, 0): [(0, 5, False), (5, 1, True)],
    (1, 4, 0): [(0, 1, True)],
}


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_a_prompt_is_cut_by_the_budget(case: tuple[int, int, int], policy) -> None:
    """Chunks are as long as the budget, the last one takes the rest, and only that one is sampled."""
    length, budget, cached = case
    engine = drive(limits(max_num_batched_tokens=budget), policy)
    if cached:
        engine.arrive(request(range(cached + 1)))
        engine.drain()
    before = len(engine.plans)
    seq = engine.arrive(request(range(length)))
    engine.drain()
    plans = engine.plans[before:]
    sampled = sampling_steps(plans, seq)
    got = [(int(p.start[0]), int(p.count[0]), p.step in sampled) for p in plans]
    assert got == CHUNKS[case]


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize(
    ("prompt", "budget", "spans"),
    [
        (8, 8, [(0, 8)]),
        (9, 8, [(0, 8), (8, 9)]),
        (31, 8, [(0, 8), (8, 16), (16, 24), (24, 31)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_prompt_longer_than_the_budget_runs_in_chunks(prompt: int, budget: int, spans, policy) -> None:
    """Both policies take as many steps as the budget asks for, even with a budget of one."""
    engine = drive(limits(max_num_batched_tokens=budget, max_model_len=32), policy)
    seq = engine.arrive(request(prompt))
    engine.drain()
    assert ranges(engine.plans, seq) == spans


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_is_no_engine(budget: int) -> None:
    """A budget below one is refused, and the setting is named."""
    with pytest.raises(InvalidSetting, match="max_num_batched_tokens"):
        limits(max_num_batched_tokens=budget)


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
def test_more_sequences_than_budget_all_end(policy, overlap: bool) -> None:
    """With five rows and a budget of two, all five prompts are served."""
    engine = drive(limits(max_num_seqs=5, max_num_batched_tokens=2), policy, overlap=overlap)
    seqs = [engine.arrive(request((i + 1, 2, 3), 4)) for i in range(5)]
    engine.drain()
    assert [len(engine.over[seq].output) for seq in seqs] == [4] * 5


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_can_never_fit_is_refused(policy, overlap: bool) -> None:
    """Of 43, 32, 33 and 8 slots wanted of a pool of 32, the first and third are refused, the others answered."""
    engine = drive(limits(num_blocks=8), policy, overlap=overlap)
    seqs = [engine.arrive(request(prompt, n)) for prompt, n in ((40, 4), (30, 3), (30, 4), (5, 4))]
    engine.drain()
    assert [(engine.over[seq].reason, len(engine.over[seq].output)) for seq in seqs] == [
        ("rejected", 0), ("length", 3), ("rejected", 0), ("length", 4),
    ]  # fmt: skip
    assert len(engine.plans) <= 12
    assert max(len(table) for plan in engine.plans for _, _, table in plan.tables) == 8


def test_long_prompts_do_not_keep_a_decode_waiting() -> None:
    """Under throughput a running row gets a token in every step, though a prompt of forty arrives with each."""
    hand = Hand.of(limits(num_blocks=400, max_num_batched_tokens=8))
    row = hand.arrive(request((5,), 30))
    for i in range(60):
        plan, output = hand.step()
        assert plan.count.sum() == min(8, 1 + 40 * i)
        assert (row in ints(output.seqs)) == (i < 30)
        hand.arrive(request([(i * 40 + j) % 900 for j in range(40)]))


def test_decodes_are_charged_to_the_budget() -> None:
    """Six decodes, the budget lowered to four: never more than four positions, and everyone in any two steps."""
    hand = Hand.of(limits(max_num_seqs=6), *(request((i + 1,), 10) for i in range(6)))
    hand.step()
    hand.state = evolve(hand.state, limits=evolve(hand.state.limits, max_num_batched_tokens=4))
    served = [set(ints(hand.step()[0].seqs)) for _ in range(8)]
    assert [len(seqs) for seqs in served] == [4] * 8
    assert all(one | two == set(range(6)) for one, two in itertools.pairwise(served))
    assert len(hand.run()) == 6


def test_the_chunk_is_sized_from_what_the_decodes_leave() -> None:
    """Three decodes leave five of eight positions to a prompt of fourteen: [0,5) [5,10) [10,14), sampled once."""
    engine = drive(limits(max_num_batched_tokens=8))
    for i in range(3):
        engine.arrive(request((i + 1,), 20))
    engine.step()
    prompt = engine.arrive(request(14, 2))
    for _ in range(3):
        engine.step()
    assert ranges(engine.plans, prompt) == [(0, 5), (5, 10), (10, 14)]
    assert sampling_steps(engine.plans, prompt) == [3]
    engine.drain()


def test_whoever_makes_room_for_older_ones_does_not_stop_them() -> None:
    """With a budget of one, no block left and the newest first in turn, it is preempted and an older one is served."""
    sizes = limits(block_size=3, num_blocks=6, max_num_seqs=3, max_num_batched_tokens=4, prefix_cache=False)
    engine = drive(sizes)
    engine.arrive(request([7] * 6, 6))
    for _ in range(3):
        engine.step()
    engine.arrive(request([7] * 8, 2))
    for _ in range(2):
        engine.step()
    engine.set_budget(1)
    engine.drain()
    assert {over.reason for over in engine.over.values()} == {"length"}
    assert any(plan.preempted for plan in engine.plans)


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize(("prompt", "blocks"), [(3, 1), (4, 1), (5, 2)])
def test_one_token_takes_no_decode(prompt: int, blocks: int, policy) -> None:
    """max_tokens 1 gives one token, uses as many slots as the prompt has tokens, and leaves in the same step."""
    hand = Hand.of(limits(prefix_cache=False), policy=policy)
    other = hand.arrive(request((9,), 20))
    hand.step()
    seq = hand.arrive(request(prompt))
    plan = hand.plan()
    assert seq in ints(plan.seqs)
    assert len(blocks_of(hand.state, seq)) == blocks
    output = hand.land(plan)
    assert [(done.seq, done.reason, len(done.output)) for done in output.finished] == [(seq, "length", 1)]
    assert [run.seq for run in hand.state.rows if run is not None] == [other]
    assert in_use(hand.state) == 1


def test_a_request_that_does_not_fit_blocks_those_behind_it() -> None:
    """First come, first served: the big one waits with the small ones behind it, in order, and goes first."""
    hand = Hand.of(limits(max_num_seqs=2, num_blocks=8, max_model_len=33))
    hand.arrive(request(16, 9))
    hand.step()
    big, small, small_2 = hand.arrive(request(24)), hand.arrive(request(3)), hand.arrive(request(3))
    for _ in range(8):
        assert [w.seq for w in hand.state.waiting] == [big, small, small_2]
        hand.step()
    plan, _ = hand.step()
    assert ints(plan.seqs)[0] == big
    assert sorted(hand.run()) in ([small, small_2], [small_2])


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
def test_those_who_left_free_their_rows_at_once(policy, overlap: bool) -> None:
    """Fifty times over, two newcomers run in the step after two others were aborted in whatever state."""
    engine = drive(limits(max_num_seqs=2, max_num_batched_tokens=4), policy, overlap=overlap)
    for i in range(50):
        pair = [engine.arrive(request((i + 1, 2, 3, 4, 5, 6), 9)) for _ in range(2)]
        for _ in range(i % 4):
            engine.step()
        for seq in pair:
            engine.abort(seq)
        news = [engine.arrive(request((i + 1, 7), 1)) for _ in range(2)]
        engine.step()
        assert set(ints(engine.plans[-1].seqs)) == set(news)
        engine.drain()


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    """Preempted after four and after six tokens, it recomputes 5+4, then 5+6 positions, and gives the same eight."""
    engine = drive(limits(block_size=1, num_blocks=19, prefix_cache=False, max_model_len=32, eos_ids=(0, 1, 2)))
    engine.arrive(request((1, 1), 5, ignore_eos=True))
    engine.arrive(request((2, 2, 2), 12, ignore_eos=True))
    seq = engine.arrive(request((3, 4, 5, 6, 7), 8, seed=7, temperature=1.0, min_tokens=6))
    right = engine.ghost.scripts[seq].answer
    engine.drain()
    preempted = [plan.step for plan in engine.plans if plan.preempted]
    assert [engine.plans[step].preempted for step in preempted] == [(seq,), (seq,)]
    before = [sum(s < step for s in sampling_steps(engine.plans, seq)) for step in preempted]
    assert before == [4, 6]
    resumed = [span for span in ranges(engine.plans, seq) if span[0] == 0]
    assert resumed == [(0, 5), (0, 9), (0, 11)]
    assert engine.over[seq].tokens == right.tokens


def test_forks_share_full_blocks_and_nothing_that_is_written() -> None:
    """Three ways on from a prompt of six: four blocks at the first decode, seven at the end, none when all are over."""
    engine = drive(limits())
    parent = engine.arrive(request(range(6), 5, seed=5, temperature=1.0))
    children = engine.fork(parent, (6, 7))
    engine.step()
    engine.step()
    assert engine.state.pool.refs[blocks_of(engine.state, parent)[0]] == 3
    assert in_use(engine.state) == 4
    for _ in range(3):
        engine.step()
    assert in_use(engine.state) == 7
    engine.drain()
    assert in_use(engine.state) == 0
    outputs = {engine.over[seq].output for seq in (parent, *children)}
    assert len(outputs) == 3


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
def test_forks_of_a_running_sequence_copy_its_partial_block(policy, overlap: bool) -> None:
    """Children of a decoding parent compute one position; the block that it writes into is copied for each."""
    engine = drive(limits(), policy, overlap=overlap)
    parent = engine.arrive(request(range(6), 5))
    engine.step()
    engine.step()
    children = engine.fork(parent, (1, 2))
    known = engine.ghost.scripts[parent].known
    engine.step()
    plan = engine.plans[-1]
    assert {child: scheduled(plan)[child] for child in children} == dict.fromkeys(children, (known - 1, known))
    assert [source for source, _ in plan.copies] == [blocks_of(engine.state, parent)[1]] * 2
    tables = [blocks_of(engine.state, seq) for seq in (parent, *children)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    engine.abort(children[0])
    engine.drain()
    assert engine.over[children[1]].reason == engine.over[parent].reason == "length"


def test_a_plan_says_all_that_the_device_needs() -> None:
    """One decode and one chunk: rows, slots, inputs, samples, tables and context, number by number."""
    hand = Hand.of(limits(max_num_batched_tokens=6))
    hand.arrive(request((10, 11, 12), 9), [77])
    hand.step()
    hand.arrive(request(range(20, 29), 2))
    plan = hand.plan()
    assert (plan.step, plan.base, plan.copies, plan.preempted) == (1, 0, (), ())
    assert [ints(column) for column in (plan.rows, plan.seqs, plan.start, plan.count, plan.context)] == [
        [1, 2], [0, 1], [3, 0], [1, 5], [4, 5],
    ]  # fmt: skip
    assert ints(plan.inputs) == [77, 20, 21, 22, 23, 24]
    assert ints(plan.slots) == [7, 8, 9, 10, 11, 12]
    assert (ints(plan.samples), ints(plan.sample_rows), ints(plan.sampling.index)) == ([0], [0], [1])
    assert plan.tables == ((2, 0, (2, 3)),)
    assert (plan.slots.dtype, plan.inputs.dtype, plan.rows.dtype) == (np.int64, np.int32, np.int32)


def test_a_token_in_flight_is_minus_one() -> None:
    """Planned before the step that samples it has landed, a decode's input is left to the device."""
    hand = Hand.of(limits())
    hand.arrive(request((10, 11), 9), [7, 8])
    first = hand.plan()
    second = hand.plan()
    assert ints(second.inputs) == [-1]
    hand.land(first)
    third = hand.plan()
    assert ints(third.inputs) == [-1]
    hand.land(second)
    hand.land(third)
    assert ints(hand.plan().inputs) == [1]


def test_a_last_token_is_never_fed_back() -> None:
    """With the last of max_tokens promised there is nothing to plan until it lands."""
    hand = Hand.of(limits())
    hand.arrive(request(3, 2))
    first, second = hand.plan(), hand.plan()
    assert schedule(hand.state, throughput)[1] is None
    hand.land(first)
    assert [done.reason for done in hand.land(second).finished] == ["length"]


@pytest.mark.parametrize("policy", BOTH)
def test_without_work_there_is_no_plan(policy) -> None:
    """Scheduling an idle engine gives no plan and the very same state."""
    state = initial(limits())
    assert schedule(state, policy) == (state, None)


def test_tables_are_complete_for_another_base() -> None:
    """A device that holds the plan before gets the delta; any other gets every running row's whole table."""
    hand = Hand.of(limits(), request(9, 9), request(3, 9))
    hand.step()
    hand.arrive(request(5, 9))
    plan = hand.plan()
    assert rebase(hand.state, plan, plan.base) is plan
    whole = rebase(hand.state, plan, plan.base - 1)
    assert (whole.base, whole.tables) == (-1, full_tables(hand.state))
    assert len(whole.tables) == 3
    assert len(plan.tables) == 1
    assert same_plan(evolve(whole, base=plan.base, tables=plan.tables), plan) == ""


def test_end_tokens_are_banned_before_min_tokens() -> None:
    """Until two tokens are sampled neither end nor stop tokens may be; after that all may."""
    hand = Hand.of(limits(eos_ids=(90, 91)), request(3, 9, min_tokens=2, stop_token_ids=(7, 90)))
    banned = [hand.step()[0].sampling.banned for _ in range(3)]
    assert [[(i, sorted(ids)) for i, ids in each] for each in banned] == [[(0, [7, 90, 91])], [(0, [7, 90, 91])], []]


@given(st.data())
def test_chunks_cover_a_prompt_as_the_naive_loop_says(data: st.DataObject) -> None:
    """Alone, a prompt of any length under any budget is cut like range(start, length, budget)."""
    length, budget, size = (data.draw(st.integers(1, n)) for n in (60, 70, 17))
    hand = Hand.of(limits(block_size=size, max_num_batched_tokens=budget, num_blocks=cdiv(60, size)), request(length))
    expected = [(a, min(a + budget, length)) for a in range(0, length, budget)]
    for a, b in expected:
        plan, _ = hand.step()
        assert scheduled(plan) == {0: (a, b)}
        assert len(plan.samples) == (b == length)


@given(st.data())
def test_slots_are_where_the_table_says(data: st.DataObject) -> None:
    """Over shuffled blocks and any mix of rows, slot = table[p // size] * size + p % size, inputs the tokens there."""
    size = data.draw(st.integers(1, 5))
    lim = limits(block_size=size, max_num_batched_tokens=data.draw(st.integers(1, 40)), num_blocks=cdiv(150, size))
    policy = data.draw(st.sampled_from([throughput, reserve]))
    hand = Hand.of(lim, policy=policy)
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=5))
    for length in lengths:
        hand.arrive(request([data.draw(st.integers(0, 3)) for _ in range(length)], data.draw(st.integers(1, 6))))
    for _ in range(12):
        state, plan = schedule(hand.state, policy)
        if plan is None:
            return
        expected = []
        for seq, (first, last) in scheduled(plan).items():
            table = blocks_of(state, seq)
            expected += [table[p // size] * size + p % size for p in range(first, last)]
            assert len(table) == cdiv(last, size)
        assert ints(plan.slots) == expected
        hand.state = state
        hand.land(plan)


def test_scheduling_changes_nothing_that_exists() -> None:
    """The state given to schedule keeps its digest, whatever becomes of the one that comes back."""
    hand = Hand.of(limits(), request(5, 9), request(9, 9))
    for _ in range(6):
        before, name = hand.state, digest(hand.state)
        hand.step()
        assert digest(before) == name
        assert digest(hand.state) != name
