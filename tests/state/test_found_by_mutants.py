"""What at first only random programs found among the planted faults of tests/mutants, or nothing did: said directly."""

from __future__ import annotations

import numpy as np
import pytest

from agentinfer.state.admit import abort, fork
from agentinfer.state.blocks import ROOT, BlockId, BlockPool, PoolDraft
from agentinfer.state.engine import find_running, has_work, tokens_of
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.plan import Plan
from agentinfer.state.policy import reserve, throughput
from agentinfer.state.schedule import scheduled
from engines import Hand, blocks_of, limits, request


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_those_who_stay_get_their_own_tokens(gone: int) -> None:
    """Whoever is aborted while a step is in flight, its other sequences get the tokens that they sampled."""
    hand = Hand.of(limits(max_num_batched_tokens=11))
    for first in (100, 200, 300):
        hand.arrive(request(range(first, first + 3), 5), [first + 50])
    hand.arrive(request(8, 5))  # gets 2 positions: it takes part, and samples nothing
    plan = hand.plan()
    hand.state = abort(hand.state, SeqId(gone))
    output = hand.land(plan)
    expected = {seq: 150 + 100 * seq for seq in range(3) if seq != gone}
    assert dict(zip(ints(output.seqs), ints(output.tokens), strict=True)) == expected
    for seq, token in expected.items():
        assert tokens_of(hand.state, SeqId(seq))[3:] == (token,)


def forked_while_a_chunk_is_in_flight() -> tuple[Hand, Plan, Plan]:
    """A prompt of 12 in chunks of 6, forked when the first has landed and the second is in flight; that one, and the
    plan after.
    """
    hand = Hand.of(limits(max_num_batched_tokens=6), request(12, 5))
    first, second = hand.plan(), hand.plan()
    hand.land(first)
    hand.state, (child,) = fork(hand.state, SeqId(0))
    hand.script[child] = []
    return hand, second, hand.plan()


def test_a_fork_waits_until_its_parent_has_landed_what_they_share() -> None:
    """Positions that are still in flight are not computed once more: the child begins when they have landed."""
    hand, second, plan = forked_while_a_chunk_is_in_flight()
    assert scheduled(plan) == {0: (12, 13)}
    hand.land(second)
    assert scheduled(hand.plan()) == {0: (13, 14), 1: (11, 12)}


def test_the_copy_of_a_partial_block_takes_its_place_in_the_childs_table() -> None:
    """The parent's partial block is copied to the child's block of the same positions, however many it takes."""
    hand, second, _ = forked_while_a_chunk_is_in_flight()
    hand.land(second)
    plan = hand.plan()
    parent, child = blocks_of(hand.state, 0), blocks_of(hand.state, 1)
    assert child[:2] == parent[:2]
    assert len(child) == 3
    assert plan.copies == ((parent[2], child[2]),)


def test_reserve_keeps_the_block_of_a_last_position_that_begins_it() -> None:
    """Of 4 blocks one sequence needs 3, the third for its last position alone: who needs 2 waits until it ends."""
    hand = Hand.of(limits(num_blocks=4), request(4, 6), policy=reserve)
    hand.step()
    second = hand.arrive(request(5, 4))
    for _ in range(5):
        hand.step()
        assert find_running(hand.state, SeqId(second)) is None
    assert find_running(hand.state, SeqId(0)) is None
    plan, _ = hand.step()
    assert ints(plan.seqs) == [second]


def test_a_hit_on_blocks_that_nobody_holds_uses_them_up() -> None:
    """Three cached blocks that a prompt hits can not be its fourth as well: it waits for one."""
    hand = Hand.of(limits(num_blocks=4), request(range(1, 13), 1))
    hand.step()
    other = hand.arrive(request(range(50, 52), 3))
    hand.step()
    again = hand.arrive(request(range(1, 14), 2))
    assert hand.state.pool.num_available == 3
    plan, _ = hand.step()
    assert ints(plan.seqs) == [other]
    hand.step()
    plan, _ = hand.step()
    assert scheduled(plan) == {again: (12, 13)}


@pytest.mark.parametrize("asked", [None, "", "y"])
def test_a_collision_of_salts_is_not_believed(asked: str | None) -> None:
    """A block is not found under another salt, even if the hashes are equal."""
    draft = PoolDraft(BlockPool.empty(4), 0, hasher=lambda *_: 7)
    (block,) = draft.take(1)
    assert draft.register(block, ROOT, "x", (1, 2), 7)
    assert draft.find(ROOT, "x", (1, 2)) == (BlockId(block), 7)
    assert draft.find(ROOT, asked, (1, 2)) == (None, 7)


def test_many_stop_ids_of_one_leave_the_others_theirs() -> None:
    """A sequence with more stop ids than the column is wide takes nobody else's away."""
    hand = Hand.of(limits())
    first = hand.arrive(request(3, 9, stop_token_ids=(93,)), [5, 6, 93])
    hand.step()
    second = hand.arrive(request(3, 9, stop_token_ids=tuple(range(100, 107))), [5, 106])
    over = hand.run()
    assert {seq: (done.reason, done.detail) for seq, done in over.items()} == {
        first: ("stop", "93"),
        second: ("stop", "106"),
    }


def test_a_row_forgets_the_stop_ids_of_who_had_it() -> None:
    """A token that ended the sequence before ends the next one in its row only if that one asks for it."""
    hand = Hand.of(limits(max_num_seqs=1))
    first = hand.arrive(request(3, 9, stop_token_ids=(91, 93)), [5, 93])
    second = hand.arrive(request(3, 4, stop_token_ids=(7,)), [5, 91, 93, 6])
    third = hand.arrive(request(3, 3), [91, 7, 93])
    over = hand.run()
    assert [over[seq].reason for seq in (first, second, third)] == ["stop", "length", "length"]


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("length", range(1, 11))
def test_chunks_are_fed_the_prompt(length: int, budget: int) -> None:
    """However a prompt is cut, the inputs of its chunks together are the prompt."""
    prompt = range(500, 500 + length)
    hand = Hand.of(limits(max_num_batched_tokens=budget), request(prompt, 1))
    fed: list[int] = []
    while len(hand.state.order) or len(hand.state.waiting):
        plan, _ = hand.step()
        fed += ints(plan.inputs)
    assert fed == [*prompt]


def test_who_is_preempted_first_is_not_forgotten() -> None:
    """A second sequence preempted while the first still waits: both come back, and all have their tokens."""
    hand = Hand.of(limits(num_blocks=6), *(request(range(first, first + 4), 12) for first in (100, 200, 300)))
    preempted: list[int] = []
    over: dict[int, int] = {}
    waited = 0
    while has_work(hand.state):
        plan, output = hand.step()
        preempted += plan.preempted
        waited = max(waited, len(hand.state.requeued))
        over |= {done.seq: len(done.output) for done in output.finished}
    assert waited == 2
    assert preempted[:2] == [2, 1]
    assert over == {0: 12, 1: 12, 2: 12}


def test_the_budget_binds_whatever_is_admitted() -> None:
    """Prompts admitted beside a prefilling row get no more positions than the step has left."""
    hand = Hand.of(limits(max_num_batched_tokens=7), request(10, 2), policy=throughput)
    hand.step()
    hand.arrive(request(11, 2))
    hand.arrive(request(13, 2))
    sums = [int(np.sum(hand.step()[0].count)) for _ in range(4)]
    assert sums == [7, 7, 7, 7]
