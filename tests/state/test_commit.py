"""commit: tokens become known, blocks findable, and sequences end for the right reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agentinfer.state.admit import abort, arrive
from agentinfer.state.check import violations
from agentinfer.state.commit import commit, flush
from agentinfer.state.engine import digest, initial, tokens_of
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.plan import sampled
from agentinfer.state.schedule import schedule
from agentinfer.state.swap import swap
from engines import BOTH, Hand, blocks_of, drive, in_use, limits, request


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "detail"),
    [
        ({}, [5, 90], "stop", "90"),
        ({}, [5, 91], "stop", "91"),
        ({}, [5, 93], "length", ""),
        ({"ignore_eos": True}, [90, 91], "length", ""),
        ({"ignore_eos": True, "stop_token_ids": (93,)}, [90, 93], "stop", "93"),
        ({"ignore_eos": True, "stop_token_ids": (90,)}, [91, 90], "stop", "90"),
        ({"stop_token_ids": (1, 2, 3, 4, 5, 6, 7, 8)}, [93, 8], "stop", "8"),
        ({"stop_token_ids": (1, 2, 3, 4, 5, 6, 7, 8)}, [91], "stop", "91"),
        ({"stop_token_ids": (93,), "min_tokens": 2}, [5, 93], "length", ""),
        ({"stop_token_ids": (93,), "min_tokens": 1}, [5, 93], "stop", "93"),
    ],
)
def test_what_ends_a_sequence(params, tokens: list[int], reason: str, detail: str) -> None:
    """Any end token unless ignored, any stop token however many, none before min_tokens, else the length."""
    hand = Hand.of(limits(eos_ids=(90, 91)))
    wanted = 8 if reason == "stop" else 2
    seq = hand.arrive(request(3, wanted, **params), tokens)
    over = hand.run()[seq]
    assert (over.reason, list(over.output)) == (reason, tokens)
    assert reason != "stop" or over.detail == detail


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_tokens_are_known_in_order(length: int) -> None:
    """After each step the sequence is its prompt and all it sampled, across block boundaries."""
    hand = Hand.of(limits())
    seq = hand.arrive(request(range(length), 12), list(range(100, 112)))
    for n in range(1, 12):
        _, output = hand.step()
        assert (ints(output.seqs), ints(output.tokens)) == ([seq], [99 + n])
        assert tokens_of(hand.state, SeqId(seq)) == (*range(length), *range(100, 100 + n))


def test_only_full_landed_blocks_can_be_found() -> None:
    """A block is registered by the commit of the step that completes it, and by nothing before."""
    hand = Hand.of(limits(max_num_batched_tokens=6))
    hand.arrive(request(11, 9))
    counts = []
    for _ in range(4):
        plan = hand.plan()
        counts.append(len(hand.state.pool.keys))
        hand.land(plan)
        counts.append(len(hand.state.pool.keys))
    assert counts == [0, 1, 1, 2, 2, 3, 3, 3]


def test_nothing_is_registered_when_the_cache_is_off() -> None:
    """Without the prefix cache a pool never knows a block, and gives all of them back as free."""
    hand = Hand.of(limits(prefix_cache=False), request(9, 9), request(9, 9))
    while hand.run():
        pass
    assert (len(hand.state.pool.keys), len(hand.state.pool.free)) == (0, 64)


def test_a_row_without_finite_logits_fails_alone() -> None:
    """Its sequence ends with an error and nothing of the step is remembered; the others get their tokens."""
    hand = Hand.of(limits(), request(range(9), 5), request(range(20, 29), 5))
    output = hand.land(hand.plan(), bad=[0])
    assert [(done.seq, done.reason, done.output) for done in output.finished] == [(0, "error", ())]
    assert ints(output.seqs) == [1]
    assert blocks_of(hand.state, 0) == ()
    assert {key.tokens[0] for key in hand.state.pool.keys.values()} == {20, 24}
    assert in_use(hand.state) == 3


def in_chunks(hand: Hand, prompt: Iterable[int], *, broken: bool = True, **more: Any) -> int:
    """Serve *prompt* to its end, whose logits may be *broken*; how many tokens were found."""
    hand.arrive(request(tuple(prompt), 1, **more))
    while not (done := hand.land(hand.plan(), bad=[0] if broken else ()).finished):
        assert violations(hand.state) == []
    assert violations(hand.state) == []
    return done[0].cached


def test_a_prompt_in_chunks_that_fails_leaves_nothing_in_the_cache() -> None:
    """Chunks that landed before, and found nothing wrong, are forgotten: the next one computes all of it again."""
    hand = Hand.of(limits(max_num_batched_tokens=4))
    before = len(hand.state.pool.free)
    assert [in_chunks(hand, range(12)) for _ in range(2)] == [0, 0]
    assert (len(hand.state.pool.keys), len(hand.state.pool.cached), len(hand.state.pool.free)) == (0, 0, before)
    assert [in_chunks(hand, range(12), broken=False) for _ in range(2)] == [0, 8]


def test_what_continues_a_forgotten_block_is_forgotten_too() -> None:
    """A cached block that follows one that is gone would be found again with it; others stay."""
    hand = Hand.of(limits())
    for prompt in (range(17), (*range(8), *range(50, 59)), range(80, 89)):
        in_chunks(hand, prompt, broken=False)
    in_chunks(hand, range(9), broken=False, salt="s")
    assert len(hand.state.pool.keys) == 4 + 2 + 2 + 2
    assert in_chunks(hand, range(9)) == 8
    assert {(key.salt, key.tokens[0]) for key in hand.state.pool.keys.values()} == {
        ("s", 0), ("s", 4), (None, 80), (None, 84),
    }  # fmt: skip


def test_blocks_that_another_sequence_holds_stay_until_it_fails_itself() -> None:
    """It goes on with them, and they can be found; when its own logits are not finite they are forgotten."""
    hand = Hand.of(limits(), request(range(9), 9))
    hand.step()
    hand.arrive(request((*range(8), 50, 51, 52, 53, 54), 9))
    hand.step()
    hand.land(hand.plan(), bad=[1])
    assert {key.tokens for key in hand.state.pool.keys.values()} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert violations(hand.state) == []
    hand.land(hand.plan(), bad=[0])
    assert len(hand.state.pool.keys) == 0
    assert len(hand.state.pool.free) == 64


def test_sequences_that_fail_together_forget_what_they_share() -> None:
    """A block that only broken rows hold is nobody's, in whatever order they are looked at."""
    hand = Hand.of(limits(), request(range(9), 9))
    hand.step()
    hand.arrive(request((*range(8), 50), 9))
    hand.step()
    hand.land(hand.plan(), bad=[0, 1])
    assert (len(hand.state.pool.keys), len(hand.state.pool.free)) == (0, 64)
    assert violations(hand.state) == []


def test_a_healthy_row_keeps_its_own_blocks_beside_a_broken_one_of_the_same_tokens() -> None:
    """What a broken row computed is never found, not even in the step that shows it broken."""
    hand = Hand.of(limits(), request(range(9), 9), request(range(9), 9))
    plan = hand.plan()
    assert ints(plan.count) == [9, 9]
    own = blocks_of(hand.state, 1)
    hand.land(plan, bad=[0])
    assert blocks_of(hand.state, 1) == own
    assert set(hand.state.pool.keys) == set(own[:2])
    assert violations(hand.state) == []


def test_what_is_forgotten_is_free_in_the_order_of_its_release() -> None:
    """Not in that of a map: two processes take the same blocks afterwards."""
    hand = Hand.of(limits(num_blocks=12, max_num_batched_tokens=4))
    in_chunks(hand, (*range(4), *range(50, 63)), broken=False)
    assert [block for block, _ in hand.state.pool.lru] == [4, 3, 2, 1]
    in_chunks(hand, range(9))
    assert list(hand.state.pool.free)[-5:] == [4, 3, 2, 6, 1]


def test_a_sequence_over_old_weights_forgets_nothing_of_the_new_ones() -> None:
    """It shares nothing with the cache: what others computed of its tokens since says nothing of its KV."""
    hand = Hand.of(limits(), request(range(9), 9))
    hand.step()
    hand.state = swap(hand.state)
    hand.arrive(request((*range(8), 70), 1))
    hand.step()
    assert len(hand.state.pool.keys) == 2
    hand.land(hand.plan(), bad=[0])
    assert (len(hand.state.pool.keys), violations(hand.state)) == (2, [])


def test_rows_that_ended_or_were_reused_are_skipped() -> None:
    """A step planned for a sequence that stopped meanwhile gives no token, not even to the row's next owner."""
    hand = Hand.of(limits(max_num_seqs=1, eos_ids=(90,)))
    first = hand.arrive(request(3, 9), [90, 55])
    one, two = hand.plan(), hand.plan()
    second = hand.arrive(request(3, 9), [66])
    assert [done.seq for done in hand.land(one).finished] == [first]
    three = hand.plan()
    assert ints(three.rows) == ints(two.rows)
    output = hand.land(two)
    assert (ints(output.seqs), output.finished) == ([], ())
    assert ints(hand.land(three).tokens) == [66]
    assert len(tokens_of(hand.state, SeqId(second))) == 4


def test_a_step_of_a_sequence_readmitted_to_its_row_is_skipped() -> None:
    """Preempted with a step in flight and back in the same row, it takes the token from its new step only."""
    engine = drive(limits(block_size=1, num_blocks=8, max_num_seqs=2, max_model_len=9), overlap=True)
    seqs = [engine.arrive(request((i + 1, 2), 6)) for i in range(2)]
    engine.drain()
    assert any(plan.preempted for plan in engine.plans)
    assert [len(engine.over[seq].output) for seq in seqs] == [6, 6]


def test_tokens_must_match_the_plan() -> None:
    """Too few or too many tokens are an error, not a shifted batch."""
    hand = Hand.of(limits(), request(3, 9), request(4, 9))
    plan = hand.plan()
    for tokens in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="step 0"):
            commit(hand.state, plan, sampled(plan, tokens, [True] * len(tokens)))


def test_an_output_tells_each_end_once() -> None:
    """Rejected, aborted and finished sequences come with the next output, and flush serves when there is no step."""
    state = initial(limits())
    state, bad = arrive(state, request(()))
    state, gone = arrive(state, request(3, 9))
    state, good = arrive(state, request(3, 1))
    state = abort(state, gone, "bored")
    state, plan = schedule(state)
    assert plan is not None
    state, output = commit(state, plan, sampled(plan, [5]))
    assert [(done.seq, done.reason) for done in output.finished] == [
        (bad, "rejected"),
        (gone, "abort"),
        (good, "length"),
    ]
    assert flush(state) == (state, None)
    state, late = arrive(state, request(()))
    state, output = flush(state)
    assert output is not None
    assert [done.seq for done in output.finished] == [late]
    assert len(output.seqs) == len(output.tokens) == 0
    assert flush(state) == (state, None)


@pytest.mark.parametrize("policy", BOTH)
def test_committing_changes_nothing_that_exists(policy) -> None:
    """Two futures of one planned step do not see each other's tokens."""
    hand = Hand.of(limits(), request(7, 9), policy=policy)
    plan = hand.plan()
    name = digest(hand.state)
    states = [commit(hand.state, plan, sampled(plan, [token]))[0] for token in (5, 6)]
    assert [tokens_of(state, SeqId(0))[-1] for state in states] == [5, 6]
    assert digest(hand.state) == name
    after = [commit(state, p, sampled(p, [9]))[0] for state, p in map(schedule, states) if p is not None]
    assert [tokens_of(state, SeqId(0))[-2:] for state in after] == [(5, 9), (6, 9)]
