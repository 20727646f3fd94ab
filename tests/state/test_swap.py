"""What a state makes of other weights: versions, a cache that forgets, sequences that go on or wait once more."""

from __future__ import annotations

import pytest

from agentinfer.state.admit import fork
from agentinfer.state.check import violations
from agentinfer.state.engine import digest, find_running, find_waiting
from agentinfer.state.event import Swapped
from agentinfer.state.history import fold
from agentinfer.state.ids import SeqId
from agentinfer.state.schedule import schedule
from agentinfer.state.sequence import since
from agentinfer.state.swap import swap
from engines import Hand, blocks_of, limits, request


def test_versions_follow_each_other() -> None:
    """A later version replaces what would have begun at its position or after it."""
    assert since(((0, 0),), 4, 1) == ((0, 0), (4, 1))
    assert since(((0, 0), (4, 1)), 4, 2) == ((0, 0), (4, 2))
    assert since(((0, 0), (4, 1)), 0, 2) == ((0, 2),)


def test_the_cache_forgets_and_blocks_that_nobody_holds_are_free() -> None:
    """A prompt that was cached is computed anew; blocks add up; what is swapped is another state."""
    hand = Hand.of(limits(), request(9, 1))
    hand.run()
    assert len(hand.state.pool.keys) == 2
    before = digest(hand.state)
    hand.state = fold(hand.state, [Swapped()])
    assert (digest(hand.state) == before, violations(hand.state), hand.state.version) == (False, [], 1)
    assert (len(hand.state.pool.keys), len(hand.state.pool.free)) == (0, 64)
    hand.arrive(request(9, 2))
    plan, _ = hand.step()
    assert plan.start.tolist() == [0]
    (done,) = hand.run().values()
    assert (done.cached, done.versions) == (0, ((0, 1),))


def test_who_runs_registers_nothing_more_and_shares_nothing() -> None:
    """Blocks that a stale sequence fills are its own; its fork begins from nothing."""
    hand = Hand.of(limits(), request(6, 20))
    for _ in range(3):
        hand.step()
    hand.state = swap(hand.state)
    run = find_running(hand.state, SeqId(0))
    assert run is not None
    assert (run.stale, run.hashes, run.versions) == (True, (), ((0, 0), (9, 1)))
    for _ in range(6):
        hand.step()
        assert violations(hand.state) == []
    assert len(hand.state.pool.keys) == 0
    hand.state, (child,) = fork(hand.state, SeqId(0))
    hand.script[child] = []
    plan, _ = hand.step()
    assert plan.start[plan.seqs.tolist().index(child)] == 0
    assert not {*blocks_of(hand.state, 0)} & {*blocks_of(hand.state, child)}
    ends = hand.run()
    assert (ends[0].versions, ends[child].versions) == (((0, 0), (9, 1)), ((0, 0), (9, 1)))


def test_recomputing_gives_all_back_and_loses_what_is_in_flight() -> None:
    """What runs waits with the tokens it knows, and is fresh once admitted; the step in flight lands into nothing."""
    hand = Hand.of(limits(), request(6, 5), request(3, 5))
    hand.step()
    flight = hand.plan()
    hand.state = swap(hand.state, recompute=True)
    assert (len(hand.state.order), hand.state.pool.num_available, violations(hand.state)) == (0, 64, [])
    waiting = find_waiting(hand.state, SeqId(0))
    assert waiting is not None
    assert (len(waiting.tokens), waiting.versions) == (7, ((0, 0), (7, 1)))
    assert hand.land(flight).tokens.tolist() == []
    plan, _ = hand.step()
    assert (plan.start.tolist(), plan.count.tolist()) == ([0, 0], [7, 4])
    assert {done.versions for done in hand.run().values()} == {((0, 0), (7, 1)), ((0, 0), (4, 1))}


@pytest.mark.parametrize("recompute", [True, False])
def test_a_token_in_flight_is_of_the_version_that_computes_it(recompute: bool) -> None:
    """Promised tokens are the old version's if they land, and sampled again by the new one if they do not."""
    hand = Hand.of(limits(), request(6, 5))
    hand.step()
    flight = hand.plan()
    hand.state = swap(hand.state, recompute=recompute)
    hand.land(flight)
    (done,) = hand.run().values()
    assert done.versions == ((0, 0), (7 if recompute else 8, 1))
    assert len(done.output) == 5


def test_a_swap_changes_the_old_state_not() -> None:
    """Purity: the state before is what it was, and can be gone on from."""
    hand = Hand.of(limits(), request(6, 5), request(9, 1))
    hand.step()
    before, name = hand.state, digest(hand.state)
    swap(before)
    swap(before, recompute=True)
    assert digest(before) == name
    assert schedule(before)[1] is not None
