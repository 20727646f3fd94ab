"""speculate and accept: what a plan with drafts says, which of them count, and that nothing is left of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.state.admit import abort, fork
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, find_running, tokens_of
from agentinfer.state.event import Arrived, Landed, Stepped
from agentinfer.state.history import replay, rewind
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.plan import Output, Plan, plan_digest, sampled
from agentinfer.state.schedule import scheduled
from agentinfer.state.speculate import accept, drafts_of, room, speculate
from agentinfer.state.trace import decode_event, encode_event
from agentinfer.testing import limits as any_limits
from agentinfer.testing import requests
from agentinfer.testing.strategies import drafts
from engines import BOTH, Hand, drive, in_use, limits, request


def begun(*prompts: Sequence[int], max_tokens: int = 20, **sizes: int) -> Hand:
    """An engine whose sequences 0, 1, .. have prefilled and sampled one token, 1."""
    hand = Hand.of(limits(**sizes), *(request(prompt, max_tokens) for prompt in prompts))
    hand.step()
    return hand


def launched(hand: Hand, drafts: Mapping[int, Sequence[int]]) -> Plan:
    """The next plan, with *drafts*."""
    plan = hand.plan()
    hand.state, plan = speculate(hand.state, plan, {SeqId(seq): guess for seq, guess in drafts.items()})
    assert violations(hand.state) == []
    return plan


def landed(hand: Hand, plan: Plan, tokens: Sequence[int], bad: Sequence[int] = ()) -> Output:
    """Land *plan* with *tokens*."""
    ok = [i not in bad for i in range(len(tokens))]
    hand.state, output = accept(hand.state, plan, sampled(plan, tokens, ok))
    assert violations(hand.state) == []
    return output


def pairs(output: Output) -> list[tuple[int, int]]:
    """(sequence, token) in the order of the output."""
    return list(zip(ints(output.seqs), ints(output.tokens), strict=True))


def numbers(state: EngineState, seq: int) -> tuple[int, ...]:
    """length, known, computed, written of a running sequence, and how many blocks it holds."""
    run = find_running(state, SeqId(seq))
    assert run is not None
    cols = state.cols
    return (*(int(x[run.row]) for x in (cols.length, cols.known, cols.computed, cols.written)), len(run.blocks))


def found(state: EngineState, first: int) -> list[tuple[int, ...]]:
    """What the prefix cache knows of a sequence that begins with the token *first*, block by block."""
    after = {key.parent: (block, key.tokens) for block, key in state.pool.keys.items() if key.parent}
    heads = [(block, key.tokens) for block, key in state.pool.keys.items() if key.tokens[0] == first]
    chain = heads[:1]
    while chain and chain[-1][0] in after:
        chain.append(after[chain[-1][0]])
    return [tokens for _, tokens in chain]


def test_a_plan_with_drafts() -> None:
    """Blocks of 4, two rows of 7 and 3 tokens: the first has three drafts, the second none."""
    hand = begun(range(10, 16), (20, 21))
    assert numbers(hand.state, 0) == (7, 7, 6, 6, 2)
    plan = launched(hand, {0: (50, 51, 52)})
    assert (plan.start.tolist(), plan.count.tolist(), plan.context.tolist()) == ([6, 2], [4, 1], [10, 3])
    assert plan.inputs.tolist() == [1, 50, 51, 52, 1]
    assert plan.slots.tolist() == [2 * 4 + 2, 2 * 4 + 3, 4 * 4, 4 * 4 + 1, 3 * 4 + 2]  # block 4 is new
    assert (plan.samples.tolist(), plan.sample_rows.tolist()) == ([0, 1, 2, 3, 4], [0, 0, 0, 0, 1])
    assert plan.sampling.index.tolist() == [1, 2, 3, 4, 1]
    assert plan.tables == ((1, 2, (4,)),)
    assert (plan.drafts, drafts_of(plan)) == ((3, 0), ((0, (50, 51, 52)),))
    assert numbers(hand.state, 0) == (10, 7, 10, 6, 3)
    assert numbers(hand.state, 1) == (4, 3, 3, 2, 1)
    assert hand.state.last is plan


@pytest.mark.parametrize(
    ("right", "tokens"),
    [(0, [60, 61, 62, 63]), (1, [50, 61, 62, 63]), (2, [50, 51, 62, 63]), (3, [50, 51, 52, 63]), (0, [60, 51, 52, 63])],
)
def test_what_counts_is_the_right_drafts_and_one_token_more(right: int, tokens: list[int]) -> None:
    """The first token that is not its draft counts, and none after it; the row is where plain steps would have it."""
    hand = begun(range(10, 16), (20, 21))
    output = landed(hand, launched(hand, {0: (50, 51, 52)}), [*tokens, 70])
    want = tokens[: right + 1]
    assert pairs(output) == [(0, want[0]), (1, 70), *((0, token) for token in want[1:])]
    plain = begun(range(10, 16), (20, 21))
    plain.script.update({0: list(want), 1: [70, 71, 72, 73]})
    for _ in want:
        plain.step()
    assert tokens_of(hand.state, SeqId(0)) == tokens_of(plain.state, SeqId(0))
    assert numbers(hand.state, 0) == numbers(plain.state, 0)
    assert found(hand.state, 10) == found(plain.state, 10)
    assert numbers(hand.state, 1) == (4, 4, 3, 3, 1)


def test_slots_of_rejected_drafts_are_written_again() -> None:
    """The step after a rejection computes the position of the first wrong draft again, in the same slot."""
    hand = begun(range(10, 16))
    plan = launched(hand, {0: (50, 51, 52)})
    landed(hand, plan, [60, 61, 62, 63])
    again = hand.plan()
    assert (again.inputs.tolist(), again.slots.tolist()) == ([60], [plan.slots[1]])
    assert hand.state.pool.num_available == 64 - 2  # the block that only drafts needed is free again


def test_a_full_block_of_wrong_drafts_is_not_found() -> None:
    """A block that rejected drafts filled is not in the prefix cache; the block of accepted ones is."""
    hand = begun(range(10, 13), num_blocks=8, max_model_len=32)
    landed(hand, launched(hand, {0: (50, 51, 52, 53, 54, 55)}), [50, 61, 0, 0, 0, 0, 0])
    assert found(hand.state, 10) == [(10, 11, 12, 1)]
    landed(hand, launched(hand, {0: (62, 63, 64)}), [62, 63, 64, 65])
    assert found(hand.state, 10) == [(10, 11, 12, 1), (50, 61, 62, 63)]


def test_an_end_token_within_the_accepted_run_cuts() -> None:
    """Nothing after an end token counts, even if it is as drafted; the blocks come back."""
    hand = begun((10, 11), eos_ids=(9,))
    output = landed(hand, launched(hand, {0: (50, 9, 51)}), [50, 9, 51, 52])
    (done,) = output.finished
    assert (done.output, done.reason, done.detail) == ((1, 50, 9), "stop", "9")
    assert pairs(output) == [(0, 50), (0, 9)]
    assert in_use(hand.state) == 0


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_no_draft_goes_beyond_max_tokens(max_tokens: int) -> None:
    """The last token is sampled by a row that has computed all before it, and no draft is computed in vain."""
    hand = begun((10, 11), max_tokens=max_tokens)
    plan = launched(hand, {0: (50, 51, 52, 53, 54)})
    assert plan.count.tolist() == [max_tokens - 1]
    output = landed(hand, plan, [50, 51, 52, 53, 54][: max_tokens - 1])
    (done,) = output.finished
    assert (done.reason, len(done.output)) == ("length", max_tokens)


def test_max_model_len_bounds_drafts() -> None:
    """So does the longest sequence that the engine has room for."""
    hand = Hand.of(limits(max_model_len=12, num_blocks=3), request(range(8), None))
    hand.step()
    plan = launched(hand, {0: range(100, 120)})
    assert plan.context.tolist() == [11]
    (done,) = landed(hand, plan, [100, 101, 102]).finished
    assert (done.reason, len(done.tokens)) == ("length", 12)


def test_end_tokens_are_banned_before_min_tokens_only() -> None:
    """Of the samples of one row those below min_tokens may not end it, and the others may."""
    hand = Hand.of(limits(eos_ids=(9,)), request((10, 11), 20, min_tokens=4, stop_token_ids=(8,)), request((20,), 9))
    hand.step()
    plan = launched(hand, {0: (50, 51, 52, 53), 1: (60,)})
    assert plan.sampling.index.tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert plan.sampling.banned == tuple((i, (8, 9)) for i in range(3))
    output = landed(hand, plan, [50, 51, 52, 9, 0, 70, 71])
    assert [(done.output, done.detail) for done in output.finished] == [((1, 50, 51, 52, 9), "9")]


def test_the_budget_is_kept() -> None:
    """Drafts take what the step's budget leaves, in the order of the plan's rows."""
    hand = begun((10, 11), (20, 21), (30, 31), max_num_batched_tokens=8)
    plan = launched(hand, dict.fromkeys(range(3), (50, 51, 52)))
    assert plan.drafts == (3, 2, 0)


@pytest.mark.parametrize("policy", BOTH)
def test_nobody_is_preempted_for_drafts(policy) -> None:
    """Where blocks are short a row gets as many drafts as its last block has room for."""
    hand = Hand.of(
        limits(num_blocks=4, max_model_len=12),
        *(request(p, 3) for p in ((10, 11, 12, 13, 14), (20, 21))),
        policy=policy,
    )
    hand.step()
    hand.arrive(request((30,), 1))
    hand.arrive(request((40,), 8))
    plan = launched(hand, {0: (50, 51, 52), 1: (60, 61, 62)})
    assert plan.preempted == ()
    free = hand.state.pool.num_available
    assert free >= 0
    assert len(plan.slots) == int(plan.count.sum())


def test_blocks_bound_drafts() -> None:
    """With no block to be had, drafts end where a row's last block does; with one, the older row gets it."""
    for blocks, want in ((4, (1, 2)), (5, (5, 2)), (6, (6, 2)), (7, (6, 6))):
        hand = begun(range(10, 16), range(20, 25), max_tokens=10, num_blocks=blocks, max_model_len=16)
        assert launched(hand, {0: range(100, 106), 1: range(100, 106)}).drafts == want


def test_a_chunk_that_does_not_sample_has_no_drafts() -> None:
    """Of a prompt in chunks only the last one can be speculated on, and drafts count against the budget like chunks."""
    hand = Hand.of(limits(max_num_batched_tokens=8), request(range(10, 22), 9))
    plan = launched(hand, {0: (50, 51)})
    assert (plan.drafts, len(plan.slots), room(hand.state, plan)) == ((), 8, {})
    landed(hand, plan, [])
    plan = launched(hand, {0: (50, 51)})
    assert (plan.drafts, plan.count.tolist(), plan.samples.tolist()) == ((2,), [6], [3, 4, 5])
    assert pairs(landed(hand, plan, [50, 61, 0])) == [(0, 50), (0, 61)]
    assert len(hand.state.pool.keys) == 3


def test_rows_whose_logits_are_edited_get_no_drafts() -> None:
    """A penalty depends on every token before, so such a row goes on one token at a time beside the others."""
    hand = Hand.of(limits(), request((10, 11), 9, presence_penalty=1.0), request((20, 21), 9))
    hand.step()
    plan = launched(hand, {0: (50,), 1: (60, 61)})
    assert (plan.drafts, [edit.sample for edit in plan.edits]) == ((0, 2), [0])
    hand = Hand.of(limits(), request((20, 21), 9), request((10, 11), 9, presence_penalty=1.0))
    hand.step()
    plan = launched(hand, {0: (60, 61)})
    assert (plan.drafts, [edit.sample for edit in plan.edits]) == ((2, 0), [3])


def test_a_row_with_drafts_in_flight_is_left_out() -> None:
    """Nobody can know what follows drafts before they have landed; the others go on, and get none meanwhile."""
    hand = begun((10, 11), (20, 21))
    flight = launched(hand, {0: (50, 51)})
    plan = hand.plan()
    assert scheduled(plan) == {1: (3, 4)}
    assert room(hand.state, plan) == {}
    assert pairs(landed(hand, flight, [50, 61, 0, 70])) == [(0, 50), (1, 70), (0, 61)]
    assert pairs(landed(hand, plan, [71])) == [(1, 71)]
    assert scheduled(hand.plan()) == {0: (4, 5), 1: (4, 5)}


def test_a_sequence_that_ends_while_its_drafts_fly() -> None:
    """Its drafts land into nothing; its blocks came back once."""
    hand = begun((10, 11), (20, 21))
    plan = launched(hand, {0: range(100, 109), 1: (60,)})
    hand.state = abort(hand.state, SeqId(0))
    assert pairs(landed(hand, plan, [*range(100, 110), 60, 61])) == [(1, 60), (1, 61)]
    assert in_use(hand.state) == 1


def test_drafts_of_an_earlier_admission_take_nothing_back() -> None:
    """A sequence admitted again, to the same row, while its drafts flew: what it has computed since stays."""
    hand = begun([5, 6, 7, 8, 9, 10])
    old = launched(hand, {0: [2, 3]})
    hand.state = rewind(hand.state, hand.state)
    again = hand.plan()
    assert again.rows.tolist() == old.rows.tolist()
    before = numbers(hand.state, 0)
    output = landed(hand, old, [2, 3, 4])
    assert pairs(output) == []
    assert numbers(hand.state, 0) == before


def test_a_fork_while_drafts_fly_begins_with_what_is_known() -> None:
    """The child has the tokens that its parent knew, none that was guessed."""
    hand = begun((10, 11))
    plan = launched(hand, {0: (50, 51)})
    hand.state, (child,) = fork(hand.state, SeqId(0))
    landed(hand, plan, [50, 51, 52])
    assert tokens_of(hand.state, child) == (10, 11, 1)
    assert scheduled(hand.plan()) == {0: (5, 6), child: (2, 3)}


def test_logits_that_are_not_finite() -> None:
    """After a wrong draft nobody looks at them; where they are the next to count, the sequence ends."""
    hand = begun((10, 11))
    assert pairs(landed(hand, launched(hand, {0: (50, 51)}), [60, 0, 0], bad=[1, 2])) == [(0, 60)]
    output = landed(hand, launched(hand, {0: (50, 51)}), [50, 51, 0], bad=[1])
    (done,) = output.finished
    assert (done.output, done.reason) == ((1, 60, 50), "error")
    assert in_use(hand.state) == 0


def test_what_is_refused() -> None:
    """Drafts for a plan that has some, and tokens outside of the vocabulary."""
    hand = begun((10, 11))
    plan = launched(hand, {0: (50,)})
    with pytest.raises(ValueError, match="step 1 has drafts already"):
        speculate(hand.state, plan, {SeqId(0): (51,)})
    for token in (-1, 1000):
        hand = begun((10, 11))
        plan = hand.plan()
        with pytest.raises(ValueError, match=f"a draft of sequence 0 is token {token}; the vocabulary has 1000"):
            speculate(hand.state, plan, {SeqId(0): (50, token)})


def test_no_drafts_no_difference() -> None:
    """Without drafts, or with those of others, speculate gives what it was given, and accept is commit."""
    hand = begun((10, 11))
    plan = hand.plan()
    for guesses in ({}, {SeqId(0): ()}, {SeqId(7): (50,)}):
        assert speculate(hand.state, plan, guesses) == (hand.state, plan)
    with pytest.raises(ValueError, match="2 tokens for 1 samples"):
        accept(hand.state, plan, sampled(plan, [1, 2]))
    hand = begun((10, 11))
    plan = launched(hand, {0: (50,)})
    with pytest.raises(ValueError, match="1 tokens for 2 samples"):
        accept(hand.state, plan, sampled(plan, [1]))


def test_drafts_are_in_the_name_of_a_plan() -> None:
    """Ranks that verify other drafts, or take drafts for a chunk, are told apart."""
    plans = []
    for guesses in ((), (50,), (51,), (50, 51)):
        hand = begun((10, 11))
        plans.append(launched(hand, {0: guesses}))
    plans.append(evolve(plans[1], drafts=()))
    assert len({plan_digest(plan) for plan in plans}) == 5


def test_a_trace_holds_the_drafts() -> None:
    """Stepped carries them, through JSON too, and replaying gives the same digest after each event."""
    events = [
        Arrived(request((10, 11), 5)), Stepped(), Landed(0, (1,)), Stepped(((SeqId(0), (50, 51)),)),
        Landed(1, (50, 60, 0)), Stepped(((SeqId(0), (61,)),)), Landed(2, (61, 62)),
    ]  # fmt: skip
    again = [decode_event(json.loads(json.dumps(encode_event(event)))) for event in events]
    assert again == events
    *_, last = replay(limits(), again)
    assert last.output is not None
    assert last.output.finished[0].output == (1, 50, 60, 61, 62)


@pytest.mark.parametrize(("right", "steps"), [(0, 13), (1, 7), (3, 4), (12, 2)])
def test_right_drafts_save_steps(right: int, steps: int) -> None:
    """13 tokens take a step each without drafts, and one step for every 4 of them with three right drafts a step."""
    engine = drive(limits())
    seq = engine.arrive(request(range(10, 20), 13))
    script = engine.ghost.scripts[seq]
    for _ in range(steps):
        assert seq not in engine.over
        engine.step(propose=lambda: {seq: script.answer.tokens[script.known : script.known + right]})
    engine.step()
    assert engine.over[seq].output == script.answer.tokens[10:]
    engine.finish()


@given(st.data())
def test_speculating_is_a_function_of_the_state(data: st.DataObject) -> None:
    """Whatever the drafts: the state given is not changed, and the step that lands is that of plain commits."""
    sizes = data.draw(any_limits())
    engine = drive(sizes)
    for _ in range(data.draw(st.integers(1, 3))):
        engine.arrive(data.draw(requests(sizes)))
    for _ in range(6):
        before, name = engine.state, digest(engine.state)
        engine.step(propose=lambda: data.draw(drafts(engine.ghost.scripts.values())))
        assert digest(before) == name
    engine.drain()
