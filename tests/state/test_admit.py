"""Who may come in, who leaves early: validate, arrive, abort, fork, fail, and the admission rule."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.errors import InvalidRequest
from agentinfer.state.admit import abort, arrive, fail, fits, fork, validate
from agentinfer.state.engine import digest, find_waiting, initial, status, tokens_of
from agentinfer.state.event import Forked
from agentinfer.state.ids import SeqId
from agentinfer.state.policy import reserve
from agentinfer.state.request import Request, SamplingParams
from agentinfer.testing import limits as any_limits
from agentinfer.testing import requests
from agentinfer.testing.oracle import refused
from engines import BOTH, Hand, blocks_of, drive, in_use, limits, request


@pytest.mark.parametrize(
    ("asked", "field", "numbers"),
    [
        (request(()), "prompt", []),
        (request((5, 1000)), "prompt", ["1000"]),
        (request(3, stop_token_ids=(1000,)), "stop_token_ids", ["1000"]),
        (request(64), "prompt", ["64"]),
        (request(64, None), "prompt", ["64"]),
        (request(60, 5), "max_tokens", ["60", "5", "64"]),
        (request(40, 4), "max_tokens", ["43", "32"]),
        (request(3, None), "max_tokens", ["63", "32"]),
        (request(3, 2, stop_token_ids=range(8), min_tokens=1), "min_tokens", ["vocabulary of 9"]),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(asked: Request, field: str, numbers: list[str]) -> None:
    """validate names the field and the numbers; arrive, total, ends it at once as rejected with the same words."""
    lim = limits(num_blocks=8)
    if field == "min_tokens":  # everything but the model's end token is a stop token
        lim = evolve(lim, vocab_size=9, eos_ids=(8,))
        validate(lim, evolve(asked, prompt=(1,), params=evolve(asked.params, ignore_eos=True)))
        asked = evolve(asked, prompt=(1,))
    with pytest.raises(InvalidRequest) as refusal:
        validate(lim, asked)
    assert refusal.value.field == field
    assert all(number in str(refusal.value) for number in numbers)
    state, seq = arrive(initial(lim), asked)
    assert [(done.seq, done.reason, done.detail) for done in state.ended] == [(seq, "rejected", str(refusal.value))]
    assert status(state, seq) == "REJECTED"


@pytest.mark.parametrize(("prompt", "max_tokens"), [(30, 3), (32, 1), (1, 32), (5, 4)])
def test_what_fits_exactly_is_accepted(prompt: int, max_tokens: int) -> None:
    """A request may need every slot of the pool: its last token is never written."""
    lim = limits(num_blocks=8)
    validate(lim, request(prompt, max_tokens))
    engine = drive(lim)
    seq = engine.arrive(request(prompt, max_tokens))
    engine.drain()
    assert len(engine.over[seq].output) == max_tokens


def test_no_max_tokens_is_to_the_end_of_the_context() -> None:
    """Without max_tokens a sequence runs to max_model_len, and that many slots are reserved for it."""
    engine = drive(limits(max_model_len=20))
    seq = engine.arrive(request(3, None))
    engine.drain()
    assert len(engine.over[seq].tokens) == 20


@given(st.data())
def test_validate_agrees_with_the_oracle(data: st.DataObject) -> None:
    """What validate lets in is what a few lines of arithmetic say can be served."""
    lim = data.draw(any_limits())
    asked = data.draw(requests(lim))
    try:
        validate(lim, asked)
    except InvalidRequest:
        assert refused(lim, asked)
    else:
        assert not refused(lim, asked)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", (0, -1, 1.5, True, 2**31)),
        ("temperature", (-1.0, float("nan"), float("inf"), 10**400, "hot", None, True)),
        ("top_p", (0.0, -0.1, 1.1, float("nan"))),
        ("top_k", (-2, 1.0, True)),
        ("min_p", (-0.1, 1.1, float("nan"))),
        ("seed", (-1, 2**63, 1.0)),
        ("stop_token_ids", ((-1,), ("a",), (1.0,), tuple(range(100_000)), None, 5)),
        ("ignore_eos", ("no", 0, None)),
        ("min_tokens", (-1, 1.0)),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, bad) -> None:
    """Every value outside the documented range is an InvalidRequest that names its field."""
    for value in bad:
        with pytest.raises(InvalidRequest) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.field == field


@pytest.mark.parametrize("prompt", [(-1,), (1.0,), ("a",), (True,), (2**31,)])
def test_a_prompt_is_made_of_token_ids(prompt) -> None:
    """What is no token id is refused by place."""
    with pytest.raises(InvalidRequest, match="prompt: item 0"):
        Request(prompt)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        *[("prompt", (prompt,)) for prompt in (None, 7, b"Hi")],
        ("params", ((1,), None)),
        ("salt", ((1,), SamplingParams(), b"x")),
    ],
)
def test_a_request_of_the_wrong_kinds_is_refused_by_name(field: str, asked: tuple[Any, ...]) -> None:
    """A prompt that is no sequence, parameters that are none and a salt that is no text are refused in few words."""
    with pytest.raises(InvalidRequest) as refusal:
        Request(*asked)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 80


def test_an_empty_prompt_harms_nobody() -> None:
    """Between two good ones, a prompt without tokens is rejected and the others are served."""
    engine = drive(limits())
    seqs = [engine.arrive(request(prompt, 2)) for prompt in ((1, 2), (), (3,))]
    engine.drain()
    assert [engine.over[seq].reason for seq in seqs] == ["length", "rejected", "length"]


def test_sequence_numbers_are_never_given_twice() -> None:
    """Equal requests are two sequences, and aborting the first, even again and late, leaves the second alone."""
    engine = drive(limits())
    one = engine.arrive(request(3, 4))
    engine.step()
    engine.abort(one)
    two = engine.arrive(request(3, 4))
    engine.abort(one)
    engine.step()
    engine.abort(one)
    engine.drain()
    assert (one, two) == (0, 1)
    assert (engine.over[one].reason, engine.over[two].reason) == ("abort", "length")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_abort_anywhere_gives_everything_back(steps: int, overlap: bool) -> None:
    """Queued, half prefilled, decoding or in flight: row and blocks are free at once and the tokens so far are told."""
    engine = drive(limits(max_num_batched_tokens=4), overlap=overlap)
    seq = engine.arrive(request(7, 9))
    for _ in range(steps):
        engine.step()
    engine.abort(seq)
    assert (in_use(engine.state), len(engine.state.order)) == (0, 0)
    assert status(engine.state, seq) == "ABORTED"
    engine.drain()
    assert (engine.over[seq].reason, engine.over[seq].detail) == ("abort", "gone")


def test_an_unknown_abort_changes_nothing() -> None:
    """Aborting what never was, or is over, gives the very same state."""
    hand = Hand.of(limits(), request(3, 1))
    hand.step()
    for seq in (0, 1, -1, 10**6):
        assert abort(hand.state, SeqId(seq)) is hand.state


def test_a_failed_step_ends_its_sequences_and_registers_nothing() -> None:
    """Their blocks return unknown to the cache, the reason is told, and others go on."""
    hand = Hand.of(limits(max_num_seqs=1), request(9, 9), request(3, 1))
    hand.plan()
    state = fail(hand.state, (SeqId(0), SeqId(77)), "out of memory")
    assert [(done.seq, done.reason, done.detail) for done in state.ended] == [(0, "error", "out of memory")]
    assert (len(state.pool.keys), in_use(state)) == (0, 0)
    hand.state = state
    assert [done.reason for done in hand.run().values()] == ["error", "length"]


def test_a_fork_needs_somebody_to_fork() -> None:
    """Forking what is not live is a KeyError; a wrong number of seeds a ValueError."""
    hand = Hand.of(limits(), request(3, 1))
    with pytest.raises(ValueError, match="2 seeds for 3"):
        fork(hand.state, SeqId(0), 3, (1, 2))
    hand.step()
    for seq in (0, 5):
        with pytest.raises(KeyError):
            fork(hand.state, SeqId(seq))


@pytest.mark.parametrize("seeds", [(2**63,), (-5,), (None, 1.5), ("3",), (True,), 5])
def test_a_seed_of_a_fork_is_one_of_a_request(seeds: Any) -> None:
    """What SamplingParams would refuse as a seed, neither fork nor its event takes."""
    hand = Hand.of(limits(), request(3, 4))
    for asked in (lambda: fork(hand.state, SeqId(0), 1, seeds), lambda: Forked(SeqId(0), seeds)):
        with pytest.raises(InvalidRequest) as refusal:
            asked()
        assert refusal.value.field == "seeds"


def test_a_child_found_no_more_than_its_prompt() -> None:
    """Though it shares generated tokens of its parent too, a child reports prompt tokens alone as cached."""
    hand = Hand.of(limits(), request(7, 20))
    for _ in range(10):
        hand.step()
    hand.state, (child,) = fork(hand.state, SeqId(0))
    hand.script[child] = []
    assert hand.run()[child].cached == 7


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_children_go_on_from_what_is_known(steps: int) -> None:
    """They wait in front of all others with the parent's tokens, and with its seed unless they have their own."""
    hand = Hand.of(limits(), request(5, 9, seed=4))
    for _ in range(steps):
        hand.step()
    late = hand.arrive(request(2, 1))
    state, children = fork(hand.state, SeqId(0), 2, (None, 8))
    waiting = [find_waiting(state, child) for child in children]
    assert [w.seed for w in waiting if w] == [4, 8]
    assert {w.tokens for w in waiting if w} == {tokens_of(state, SeqId(0))}
    assert [w.seq for w in state.requeued] == list(children)
    assert children == (late + 1, late + 2)
    assert digest(hand.state) != digest(state)


def test_seeds_that_nobody_chose_differ() -> None:
    """Requests without a seed draw one from the engine's seed and their number: the same in every run."""
    seeds = []
    for engine_seed in (0, 0, 1):
        state = initial(limits(seed=engine_seed))
        for _ in range(20):
            state, _ = arrive(state, request(3, 1, seed=None))
        seeds.append([w.seed for w in state.waiting])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 40
    assert all(0 <= seed < 2**63 for seed in seeds[2])


@pytest.mark.parametrize("policy", BOTH)
def test_fits_says_what_schedule_does(policy) -> None:
    """Whoever fits is admitted by the next step, and who does not is not, for every number of free blocks."""
    for blocks in range(4, 14):
        hand = Hand.of(limits(num_blocks=blocks, max_model_len=17, prefix_cache=False), request(9, 4), policy=policy)
        hand.step()
        hand.step()
        seq = hand.arrive(request(9, 8))
        waiting = find_waiting(hand.state, SeqId(seq))
        assert waiting is not None
        expected = fits(hand.state, waiting, reserve=policy is reserve)
        hand.plan()
        assert bool(blocks_of(hand.state, seq)) == expected
