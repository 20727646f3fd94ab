"""n completions of one prompt: forks that share it, each what a request of its own with the derived seed would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import engines
import toys
from agentinfer.build import Settings
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, generate, open_engine, run, sequences, stream
from agentinfer.state.admit import arrive, child_seed
from agentinfer.state.check import violations
from agentinfer.state.engine import digest, initial
from agentinfer.state.event import Event
from agentinfer.state.history import rewind
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.trace import Trace, verify
from tiny import write_tiny

PROMPT = [3, 1, 4, 1, 5, 9]
THREE = SamplingParams(n=3, max_tokens=5, seed=5, ignore_eos=True)
MIXED = [(PROMPT, THREE), (list(range(30)), evolve(THREE, n=4, seed=None)), ([7], evolve(THREE, n=2, seed=9))]


def small(folder: Path, **changes: Any) -> Engine:
    """A small engine."""
    base = Settings(block_size=4, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    return open_engine(folder, evolve(base, **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer."""
    return toys.folder_of(write_tiny(tmp_path_factory.mktemp("n"), vocab_size=280), toys.byte_level())


def separate(folder: Path, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """What requests of their own with the derived seeds give. The request's own seed must be there."""
    assert params.seed is not None
    each = [evolve(params, n=1, seed=child_seed(params.seed, j)) for j in range(params.n)]
    return [generate(small(folder), [prompt], one)[0].output_ids for one in each]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["reserve", "throughput"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"max_num_batched_tokens": 4}, {"max_num_seqs": 2}, {"num_blocks": 11}, {"prefix_cache": False}],
    ids=str,
)
def test_each_is_a_request_of_its_own(folder: Path, shape: dict[str, Any], policy: str, *, overlap: bool) -> None:
    """KV-09: chunked, with few rows, preempted, without a cache, overlapped: seeds alone decide what each says."""
    engine = small(folder, policy=policy, overlap=overlap, **shape)
    results = generate(engine, [prompt for prompt, _ in MIXED], [params for _, params in MIXED])
    assert [len(result.outputs) for result in results] == [3, 4, 2]
    for i in (0, 2):
        assert [one.output_ids for one in results[i].outputs] == separate(folder, *MIXED[i])
        assert [one.index for one in results[i].outputs] == list(range(MIXED[i][1].n))
    assert len({one.output_ids for one in results[1].outputs}) == 4, "drawn seeds differ, too"
    assert violations(engine.world.state) == []
    assert (engine.world.state.pool.num_available, engine.groups) == (engine.machine.limits.num_blocks, {})


def test_the_prompt_is_computed_once_and_shared(folder: Path) -> None:
    """KV-09: block 0 is held three times, 1 + 3 blocks at the first decode of all, 1 + 3 * 2 at the end."""
    engine = small(folder, overlap=False, prefix_cache=False)
    first = engine.add(Request(tuple(PROMPT), THREE))
    used, computed, shared = list[int](), 0, list[int]()
    while engine.unfinished:
        engine.step()
        state = engine.world.state
        used.append(int((state.pool.refs > 0).sum()))
        shared.append(int(state.pool.refs.max()))
        plan = engine.world.flight.plan if engine.world.flight is not None else None
        computed += 0 if plan is None else int(plan.count[plan.start < 6].sum())
    assert computed == 6 + 2, "each child computes the last token of the prompt"
    assert (used[1], max(used), max(shared)) == (4, 7, 3)
    assert sequences(first, Request(tuple(PROMPT), THREE)) == (0, 1, 2)


def test_more_than_the_pool_can_hold_take_turns(folder: Path) -> None:
    """Eight completions of which two fit: all are served, whatever the policy; none is refused."""
    for policy in ("reserve", "throughput"):
        engine = small(folder, policy=policy, num_blocks=6)
        params = evolve(THREE, n=8, max_tokens=12)
        (result,) = generate(engine, [PROMPT], params)
        assert [one.output_ids for one in result.outputs] == separate(folder, PROMPT, params)


@given(st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_child_seeds_are_seeds(seed: int, j: int) -> None:
    """In range, the first one the request's own, neighbours apart; and fixed for good."""
    assert 0 <= child_seed(seed, j) < 2**63
    assert child_seed(seed, 0) == seed
    assert len({child_seed(seed, k) for k in range(50)} | {child_seed(seed ^ 1, k) for k in range(50)}) == 100
    assert (child_seed(5, 1), child_seed(0, 2)) == (6570602319725444604, 3847035821242671879)


# --- clients ----------------------------------------------------------------------------------------------------------


def test_a_stream_says_whose_each_piece_is(folder: Path) -> None:
    """Pieces of each make up its text and tokens; its last one has all of it, the last of all the result."""
    (want,) = generate(small(folder), [PROMPT], evolve(THREE, logprobs=1, prompt_logprobs=0))
    deltas = list(stream(small(folder), PROMPT, evolve(THREE, logprobs=1, prompt_logprobs=0)))
    for i, one in enumerate(want.outputs):
        mine = [delta for delta in deltas if delta.index == i]
        assert tuple(token for delta in mine for token in delta.token_ids) == one.output_ids
        assert "".join(delta.text for delta in mine) == one.text
        assert tuple(said for delta in mine for said in delta.logprobs or ()) == mine[-1].completion.logprobs
        assert [delta.completion is not None for delta in mine] == [*[False] * (len(mine) - 1), True]
        assert mine[-1].completion is not None
        assert mine[-1].completion.output_ids == one.output_ids
    assert [delta.result is not None for delta in deltas] == [*[False] * (len(deltas) - 1), True]
    result = deltas[-1].result
    assert result is not None
    assert [one.output_ids for one in result.outputs] == [one.output_ids for one in want.outputs]
    assert len(result.prompt_logprobs or ()) == len(want.prompt_logprobs or ()) == 6
    assert (result.text, result.finish_reason, result.error) == (want.text, "length", None)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborting_the_first_ends_all(folder: Path, steps: int) -> None:
    """Before, while and after the prompt is computed: no sequence of the request is left, and no block."""
    engine = small(folder)
    request = Request(tuple(PROMPT), evolve(THREE, max_tokens=50))
    seqs = sequences(engine.add(request, name="x"), request)
    for _ in range(steps):
        engine.step()
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(request, name="x")
    engine.abort(seqs[0], "enough")
    ends = {done.seq: done.reason for done in run(engine, seqs)}
    assert ends == dict.fromkeys(seqs, "abort")
    for _ in range(2):
        engine.step()
    assert engine.world.state.pool.num_available == 80
    engine.add(request, name="x")


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_one_that_ends_leaves_the_others(folder: Path, gone: int) -> None:
    """A child alone can be aborted; the first one may end long before the others, and the request can still be."""
    engine = small(folder)
    request = Request(tuple(PROMPT), evolve(THREE, max_tokens=8))
    seqs = sequences(engine.add(request), request)
    for _ in range(4):
        engine.step()
    if gone:
        engine.abort(seqs[gone])
        ends = {done.seq: done for done in run(engine, seqs)}
        want = separate(folder, PROMPT, request.params)
        for i, seq in enumerate(seqs):
            assert ends[seq].output == want[i] or i == gone
            assert (ends[seq].reason == "abort") == (i == gone)
    else:
        next(iter(run(engine, seqs[:1])))
        engine.abort(seqs[0])
        assert {done.reason for done in run(engine, seqs[1:])} <= {"abort", "length"}
    assert not engine.unfinished or engine.step() is None
    assert engine.world.state.pool.num_available == 80


def test_closing_a_stream_ends_all(folder: Path) -> None:
    """Whoever stops listening to one has stopped listening to all."""
    engine = small(folder)
    pieces = stream(engine, PROMPT, evolve(THREE, max_tokens=100))
    next(pieces)
    pieces.close()
    for _ in range(2):
        engine.step()
    assert not engine.unfinished
    assert engine.world.state.pool.num_available == 80


def test_a_reset_knows_what_belongs_together(folder: Path) -> None:
    """After going back to a state in which a request of three lived, aborting its first ends all three."""
    engine = small(folder)
    first = engine.add(Request(tuple(PROMPT), THREE))
    engine.step()
    early = engine.world.state
    while engine.unfinished:
        engine.step()
    engine.reset(rewind(early, engine.world.state))
    assert engine.unfinished
    engine.abort(first)
    while engine.unfinished:
        engine.step()
    assert not len(engine.world.state.order)
    assert not len(engine.world.state.waiting)
    assert engine.world.state.pool.num_available == engine.world.state.limits.num_blocks


def test_a_run_of_many_replays(folder: Path) -> None:
    """The trace of requests for several completions gives every state again."""
    engine, events, digests = small(folder, num_blocks=14), list[Event](), list[str]()

    def note(event: Event, state: Any) -> None:
        events.append(event)
        digests.append(digest(state))

    engine.note = note
    generate(engine, [prompt for prompt, _ in MIXED], [params for _, params in MIXED])
    assert verify(Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))) is None


def test_what_can_not_be_is_refused_whole(folder: Path) -> None:
    """A greedy n, an n out of range; and a request that can never fit ends as often as it was to be answered, whoever
    finds out.
    """
    for n, temperature in ((2, 0.0), (0, 1.0), (True, 1.0), (16_385, 1.0)):
        with pytest.raises(InvalidRequest, match="n: "):
            SamplingParams(n=n, temperature=temperature)
    (result,) = generate(small(folder), [[1] * 300], THREE)
    assert [(one.index, one.finish_reason) for one in result.outputs] == [(i, "rejected") for i in range(3)]
    assert {one.error for one in result.outputs} == {result.error}
    state, first = arrive(initial(engines.limits()), engines.request(70, n=3, temperature=1.0))
    assert [done.seq for done in state.ended] == [first, first + 1, first + 2]
    assert {done.reason for done in state.ended} == {"rejected"}
    assert state.next_seq == 3
