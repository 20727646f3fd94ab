"""The two policies' promises in small numbers, and policies of one's own."""

from __future__ import annotations

from itertools import islice

import pytest
from attrs import evolve

from agentinfer.errors import AgentInferError
from agentinfer.state.admit import abort, fork
from agentinfer.state.engine import has_work
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.policy import POLICIES, queue, reserve, throughput
from agentinfer.state.schedule import schedule, scheduled
from agentinfer.testing import Fault
from engines import BOTH, Hand, blocks_of, drive, limits, request


def test_policies_have_names() -> None:
    """A command line finds both policies by name, and nobody can put another in."""
    assert dict(POLICIES) == {"reserve": reserve, "throughput": throughput}
    with pytest.raises(TypeError):
        POLICIES["mine"] = reserve


def test_reserve_prefills_first_and_apart() -> None:
    """While a prompt is there to compute nothing decodes, and no step holds both."""
    hand = Hand.of(limits(max_num_batched_tokens=4), request(3, 9), policy=reserve)
    hand.step()
    hand.step()
    hand.arrive(request(10, 3))
    spans = [scheduled(hand.step()[0]) for _ in range(4)]
    assert spans == [{1: (0, 4)}, {1: (4, 8)}, {1: (8, 10)}, {0: (4, 5), 1: (10, 11)}]


def test_throughput_mixes_prompts_and_decodes() -> None:
    """A decode goes on in the step that begins another's prompt."""
    hand = Hand.of(limits(max_num_batched_tokens=4), request(3, 9))
    hand.step()
    hand.arrive(request(5, 3))
    assert [scheduled(hand.step()[0]) for _ in range(2)] == [{0: (3, 4), 1: (0, 3)}, {0: (4, 5), 1: (3, 5)}]


@pytest.mark.parametrize(("blocks", "together"), [(7, True), (6, False)])
def test_reserve_admits_what_runs_to_its_end(blocks: int, together: bool) -> None:
    """Two sequences of 13 and 12 slots need 4 + 3 blocks: with six the second waits, although its prompt would fit."""
    hand = Hand.of(limits(num_blocks=blocks, max_model_len=17), policy=reserve)
    hand.arrive(request((1, 2), 12))
    hand.arrive(request((3, 4), 11))
    hand.step()
    assert bool(blocks_of(hand.state, 1)) == together
    over = hand.run()
    assert [len(done.output) for done in over.values()] in ([11, 12], [12, 11])


def test_reserve_takes_no_block_early() -> None:
    """The promise is a number: a running sequence holds the blocks of what it has computed, and no more."""
    hand = Hand.of(limits(num_blocks=8, max_model_len=33), request(3, 20), policy=reserve)
    assert [len((hand.step(), blocks_of(hand.state, 0))[1]) for _ in range(6)] == [1, 1, 2, 2, 2, 2]


def test_throughput_preempts_the_newest_first() -> None:
    """When blocks run out the newest of three goes, alone if that is enough, and waits in front of newcomers."""
    hand = Hand.of(limits(block_size=1, num_blocks=13, max_model_len=14, prefix_cache=False))
    for i in range(3):
        hand.arrive(request((i + 1, 2), 8))
    gone: list[tuple[int, ...]] = []
    while not gone:
        late = hand.arrive(request((9, 9), 1))
        plan, _ = hand.step()
        gone += [plan.preempted] if plan.preempted else []
    assert gone == [(2,)]
    assert hand.state.requeued[0].seq == 2
    assert [w.seq for w in hand.state.waiting][-1] == late
    assert ints(plan.seqs) == [0, 1]


def test_a_fork_comes_behind_its_parent_that_waits() -> None:
    """Whoever admits one at a time, from the front, reaches the parent first; a fork of a fork waits for the same."""
    hand = Hand.of(limits(), request((1, 2), 3), request((3, 4), 3))
    hand.state, (one, two) = fork(hand.state, SeqId(1), 2)
    hand.state, (three,) = fork(hand.state, one)
    assert [w.seq for w in queue(hand.state)] == [0, 1, one, two, three]

    def first_alone(state):
        for turn in throughput(state):
            yield evolve(turn, admit=islice(turn.admit, 0 if len(state.order) else 1))

    lone = Hand.of(limits(), request((3, 4), 3), policy=first_alone)
    lone.state, children = fork(lone.state, SeqId(0), 2)
    lone.script |= {child: [] for child in children}
    assert sorted(lone.run()) == [0, 1, 2]


@pytest.mark.parametrize("policy", BOTH)
def test_forks_and_preempted_go_before_newcomers(policy) -> None:
    """With one row free, a child goes first though another came before it; then the others in order of arrival."""
    hand = Hand.of(limits(max_num_seqs=2), request(3, 20), policy=policy)
    hand.step()
    early = hand.arrive(request(4, 1))
    hand.state, (child,) = fork(hand.state, SeqId(0))
    late = hand.arrive(request(5, 1))
    hand.script[child] = []
    assert child in ints(hand.step()[0].seqs)
    hand.state = abort(hand.state, child)
    assert early in ints(hand.step()[0].seqs)
    assert late in ints(hand.step()[0].seqs)


@pytest.mark.parametrize(("rows", "budget", "most"), [(6, 2, 2), (6, 4, 1), (5, 2, 2), (3, 1, 2), (4, 4, 0)])
def test_nobody_waits_longer_than_documented(rows: int, budget: int, most: int) -> None:
    """Under throughput a running row is left out at most ceil(rows / budget) - 1 steps in a row."""
    hand = Hand.of(limits(max_num_seqs=rows), *(request((i + 1,), 40) for i in range(rows)))
    hand.step()
    hand.state = evolve(hand.state, limits=evolve(hand.state.limits, max_num_batched_tokens=budget))
    last, gaps = dict.fromkeys(range(rows), -1), []
    for step in range(20):
        for seq in ints(hand.step()[0].seqs):
            gaps.append(step - last[seq] - 1)
            last[seq] = step
    assert max(gaps) == most


def test_a_policy_is_a_function_of_the_state() -> None:
    """Shortest prompt first in three lines: the order of admission follows it, and every rule still holds."""

    def shortest_first(state):
        for turn in throughput(state):
            yield evolve(turn, admit=sorted(turn.admit, key=lambda w: len(w.tokens)))

    engine = drive(limits(max_num_seqs=1), shortest_first)
    for prompt in (9, 3, 5):
        engine.arrive(request(prompt, 2))
    engine.drain()
    assert [int(plan.seqs[0]) for plan in engine.plans] == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("policy", BOTH)
def test_a_turn_may_ask_for_too_much(policy) -> None:
    """Counts beyond budget or need are cut by schedule, or refused by name; no plan overruns."""

    def greedy(state):
        for turn in policy(state):
            yield evolve(turn, count=turn.count + 100)

    engine = drive(limits(max_num_batched_tokens=4), greedy)
    for prompt in (9, 3):
        engine.arrive(request(prompt, 4))
    try:
        engine.drain()
    except (AgentInferError, ValueError) as error:
        assert not isinstance(error, Fault)  # noqa: PT017 - both ways out are sound
    assert all(plan.count.sum() <= 4 for plan in engine.plans)


def test_serving_nobody_is_noticed() -> None:
    """A policy without turns gives no plan; the testing tools call it by name."""
    hand = Hand.of(limits(), request(3, 2))
    assert schedule(hand.state, lambda _: ()) == (hand.state, None)
    assert has_work(hand.state)
    engine = drive(limits(), lambda _: ())
    engine.arrive(request(3, 2))
    with pytest.raises(Fault, match="serves nobody"):
        engine.step()


def test_reserve_admits_a_request_when_all_of_it_fits() -> None:
    """Three of 10 slots, 5 of them shared, need 3 + 2 + 2 blocks: with 6 free nobody begins, nor overtakes."""
    lim = limits(num_blocks=9, max_num_seqs=8, prefix_cache=False)
    hand = Hand.of(lim, request(6, 7), policy=reserve)  # 12 slots: 3 blocks
    hand.step()
    hand.arrive(request(range(6), 5, n=3, temperature=1.0))
    for seq in (2, 3):
        hand.script[seq] = []
    last = hand.arrive(request(2, 1))
    alone = [hand.step()[0].seqs.tolist() for _ in range(6)]
    assert alone == [[0]] * 6, "3 + 2 + 2 blocks are more than the 6 that are left"
    assert hand.step()[0].seqs.tolist() == [1]
    assert hand.step()[0].seqs.tolist() == [2, 3, last]
    assert {seq: len(done.output) for seq, done in hand.run().items()} == {1: 5, 2: 5, 3: 5}
