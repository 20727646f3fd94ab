"""The state as a value: fold, replay, rewind, diff, explain, forecast."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.state.engine import digest, find_waiting, initial, tokens_of
from agentinfer.state.event import Aborted, Arrived, Failed, Forked, Landed, Stepped, Stopped
from agentinfer.state.history import Moment, diff, ended, explain, fold, forecast, replay, rewind, step
from agentinfer.state.ids import SeqId
from agentinfer.state.policy import reserve, throughput
from engines import BOTH, Hand, drive, in_use, limits, request


def test_events_fold_to_the_transitions() -> None:
    """Each event does what its function does, and one about a sequence that has left does nothing."""
    hand = Hand.of(limits(), request(3, 9))
    state = fold(initial(limits()), [Arrived(request(3, 9))])
    assert digest(state) == digest(hand.state)
    state = fold(state, [Forked(SeqId(0), (1, 2)), Aborted(SeqId(0)), Failed(0, (SeqId(2),), "gone")])
    assert [w.seq for w in state.requeued] == [1]
    assert [done.reason for done in state.ended] == ["abort", "error"]
    assert fold(state, [Forked(SeqId(0)), Aborted(SeqId(9)), Failed(3, (SeqId(0),), "")]) is state
    with pytest.raises(TypeError, match="Stepped"):
        fold(state, [Stepped()])


def test_a_stop_string_ends_a_sequence_after_its_tokens() -> None:
    """The tokens that came after it are dropped, a waiting one can end too, and a late or second event does nothing."""
    hand = Hand.of(limits(), request(3, 9))
    for _ in range(4):
        hand.step()
    state = fold(hand.state, [Forked(SeqId(0)), Stopped(SeqId(0), 2, "ab"), Stopped(SeqId(1), 3, "abc")])
    first, second = state.ended
    assert (first.reason, first.detail, first.matched, len(first.output)) == ("stop", "ab", "ab", 2)
    assert (second.matched, len(second.output)) == ("abc", 3)
    assert state.pool.num_available == state.limits.num_blocks
    assert fold(state, [Stopped(SeqId(0), 1, "a")]) is state


def test_a_step_that_is_not_in_flight_can_not_land() -> None:
    """Landing or failing an unknown step raises ValueError with its number."""
    moment = step(step(Moment(initial(limits())), Arrived(request(3, 9))), Stepped())
    for event in (Landed(5, (1,)), Failed(5, (SeqId(0),), "gone")):
        with pytest.raises(ValueError, match="step 5"):
            step(moment, event)
    after = step(moment, Landed(0, (7,)))
    assert after.flights == ()
    assert after.output is not None
    assert after.output.tokens.tolist() == [7]


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("overlap", [False, True])
def test_six_hundred_events_replay_in_half_a_second(policy, overlap: bool) -> None:
    """Recorded with aborts, forks, failures and bad logits, all digests agree, and it is quick."""
    engine = drive(limits(max_num_batched_tokens=8), policy, overlap=overlap)
    while len(engine.events) < 600:
        i = len(engine.events)
        seq = engine.arrive(request((i % 5 + 1, *range(i % 7)), 6))
        engine.step(bad=i if i % 11 == 0 else None)
        if i % 13 == 0 and seq in engine.live:
            engine.fork(seq, (None, 3))
        if i % 17 == 0:
            engine.abort(seq)
        engine.step(launch_fails=i % 19 == 0, land_fails=i % 23 == 0)
    events, digests = engine.events[:600], engine.digests[:600]
    took = []
    for _ in range(3):
        began = time.process_time()
        moments = list(replay(engine.limits, events, policy))
        took.append(time.process_time() - began)
    assert [digest(moment.state) for moment in moments[1:]] == digests
    assert min(took) < 0.5
    told = ended(moments)
    assert {seq: told[seq].tokens for seq in engine.over if seq in told} == {
        seq: done.tokens for seq, done in engine.over.items() if seq in told
    }


def test_a_rewound_engine_gives_the_same_answers() -> None:
    """Back three steps over newer KV: sequences wait with what they knew, find what is cached, and end the same."""
    engine = drive(limits(num_blocks=12, max_model_len=40))
    seqs = [engine.arrive(request(range(i, i + 9), 12)) for i in range(2)]
    for _ in range(6):
        engine.step()
    old = engine.snapshots[-4]
    newer = engine.arrive(request(3, 2))
    engine.step()
    engine.rewind(4)
    assert engine.live == seqs
    assert in_use(engine.state) == 0
    assert [len(tokens_of(engine.state, seq)) for seq in seqs] == [old.known[seq] for seq in seqs]
    assert engine.state.next_seq == newer + 1
    engine.drain()
    assert all(engine.over[seq].tokens == engine.ghost.scripts[seq].answer.tokens for seq in seqs)
    assert newer not in engine.over


@pytest.mark.parametrize("policy", BOTH)
def test_a_step_in_flight_lands_into_nothing_after_a_rewind(policy) -> None:
    """Though its sequence runs again in the same row, an old step gives it no token, and no step number comes twice."""
    engine = drive(limits(), policy, overlap=True)
    seq = engine.arrive(request(3, 9))
    for _ in range(3):
        engine.step()
    flight = engine.flight
    assert flight is not None
    engine.rewind(2)
    output = engine.step()
    assert output is not None
    assert (output.step, len(output.tokens)) == (flight.plan.step, 0)
    assert engine.plans[-1].rows.tolist() == flight.plan.rows.tolist()
    engine.drain()
    assert [plan.step for plan in engine.plans] == list(range(len(engine.plans)))
    assert engine.over[seq].reason == "length"


def test_rewinding_to_now_preempts_everybody() -> None:
    """Rewound to itself a state has nobody running, everybody waiting with the same tokens, and every block to give."""
    hand = Hand.of(limits(), request(9, 9), request(3, 9))
    hand.step()
    back = rewind(hand.state, hand.state)
    for seq in (SeqId(0), SeqId(1)):
        waiting = find_waiting(back, seq)
        assert waiting is not None
        assert waiting.tokens == tokens_of(hand.state, seq)
    assert back.pool.num_available == 64


def test_a_diff_says_what_changed() -> None:
    """Equal states differ in nothing; a step shows as the places and blocks that it moved."""
    hand = Hand.of(limits(), request(3, 9))
    before = hand.state
    assert diff(before, before) == []
    hand.step()
    lines = diff(before, hand.state)
    assert "step: 0 -> 1" in lines
    assert any("sequence 0: waiting with 3 tokens -> row 1" in line for line in lines)
    assert any("64/0/0 -> 63/0/1" in line for line in lines)
    hand.run()
    assert any("-> gone" in line for line in diff(before, hand.state))


def test_explain_tells_why_a_sequence_waited() -> None:
    """The one behind a full house is said to wait, with what there was, and then to run."""
    engine = drive(limits(max_num_seqs=1))
    engine.arrive(request(3, 3))
    late = engine.arrive(request(3, 2))
    engine.drain()
    lines = explain(replay(engine.limits, engine.events, throughput), late)
    assert "0 rows" in " ".join(lines)
    assert any("waiting with 3 tokens" in line for line in lines)
    assert "row 1" in lines[-1]
    assert explain(replay(engine.limits, engine.events, throughput), SeqId(77)) == []


@pytest.mark.parametrize("policy", BOTH)
@given(data=st.data())
def test_a_forecast_is_what_happens(policy, data: st.DataObject) -> None:
    """With nothing stopping early and nobody arriving, forecast times are the real scheduler's, step by step."""
    hand = Hand.of(limits(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=40), policy=policy)
    for _ in range(data.draw(st.integers(1, 5))):
        hand.arrive(
            request(
                [data.draw(st.integers(0, 9)) for _ in range(data.draw(st.integers(1, 12)))],
                data.draw(st.integers(1, 8)),
            )
        )
    seen = forecast(hand.state, lambda plan: 0.5 + plan.count.sum(), policy)
    now, first, finish, preempted = 0.0, {}, {}, 0
    while len(finish) < hand.state.next_seq:
        plan, output = hand.step()
        now += 0.5 + plan.count.sum()
        preempted += len(plan.preempted)
        for seq in output.seqs.tolist():
            first.setdefault(seq, now)
        finish |= {done.seq: now for done in output.finished}
    assert (dict(seen.first_token_s), dict(seen.finish_s), seen.preemptions) == (first, finish, preempted)


def test_a_forecast_changes_nothing() -> None:
    """Looking ahead leaves the state as it is, and an idle engine has nothing coming."""
    hand = Hand.of(limits(), request(3, 9), policy=reserve)
    name = digest(hand.state)
    assert forecast(hand.state, lambda _: 1.0, reserve).finish_s == {0: 9.0}
    assert digest(hand.state) == name
    assert forecast(initial(limits()), lambda _: 1.0).finish_s == {}
