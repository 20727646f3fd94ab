"""The loop over a real (tiny) model: whatever the engine does on the way, the tokens are the model's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen

from agentinfer.build import Settings
from agentinfer.errors import AgentInferError, InvalidRequest
from agentinfer.loop import Engine, Result, World, advance, generate, open_engine, run, stream
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, initial, tokens_of
from agentinfer.state.event import Arrived, Event
from agentinfer.state.history import replay, rewind
from agentinfer.state.ids import SeqId
from agentinfer.state.policy import POLICIES, Turn
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.trace import Trace, verify
from agentinfer.steps import prefill_step
from tiny import write_tiny

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
FIRST = (2, 2, 5, 5, 5, 6, 8, 8)
"""Chosen so that no choice on the way is a near tie."""
PROMPTS = [[first] * (3 * i + 1) + [7, 8, 9] for i, first in enumerate(FIRST)]
MARGIN = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@frozen
class Recording:
    """Told of each event: a trace so far."""

    events: list[Event] = field(factory=list)
    digests: list[str] = field(factory=list)

    def __call__(self, event: Event, state: EngineState) -> None:
        name = digest(state)
        self.events.append(event)
        self.digests.append(name)

    def difference(self, engine: Engine) -> int | None:
        """The first event that replays to another state."""
        return verify(Trace(engine.machine.limits, "throughput", tuple(self.events), tuple(self.digests)))


def small(**changes: object) -> Settings:
    """Settings for a tiny pool."""
    base = Settings(block_size=4, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    return evolve(base, **changes)


def naive(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], float]:
    """Greedy tokens by recomputing everything for each token, and the smallest top-2 margin on the way."""
    m, tokens, margin = engine.machine, list(prompt), float("inf")
    for _ in range(n):
        kv = allocate(
            [layer.layout for layer in engine.world.device.kv.layers], 64, 1, 64, m.ranks.device, float("nan")
        )
        x, kv = by_hand(kv, [tokens], [0], [list(range(1, 65))])
        logits, kv = prefill_step(m, kv, x)
        best = torch.topk(logits[0], 2).values
        margin = min(margin, float(best[0] - best[1]))
        tokens.append(int(logits[0].argmax()))
        if tokens[-1] in m.limits.eos_ids:
            break
    return tokens[len(prompt) :], margin


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[int, ...]]:
    """What the model says to PROMPTS; all with a margin that no rounding crosses."""
    engine = open_engine(folder, small())
    found = [naive(engine, prompt, 16) for prompt in PROMPTS]
    assert min(margin for _, margin in found) > MARGIN
    return [tuple(tokens) for tokens, _ in found]


def outputs(results: list[Result]) -> list[tuple[int, ...]]:
    """The generated tokens of each."""
    assert all(result.error is None for result in results), results
    return [result.output_ids for result in results]


SHAPES = [
    {},
    {"block_size": 1, "num_blocks": 320},
    {"block_size": 16, "num_blocks": 20},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 3},
    {"max_num_seqs": 3},
    {"prefix_cache": False},
    {"num_blocks": 11},  # one request at a time, and preemption under throughput
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_do_not_depend_on_how_the_engine_runs(
    folder: Path, answers: list[tuple[int, ...]], shape: dict[str, int], policy: str, *, overlap: bool
) -> None:
    """Greedy tokens are the naive model's, whatever the batch, chunks, blocks, cache, policy or overlap."""
    engine = open_engine(folder, small(policy=policy, overlap=overlap, **shape))
    assert outputs(generate(engine, PROMPTS, GREEDY)) == answers
    again = generate(engine, PROMPTS[::-1], GREEDY)
    assert outputs(again) == answers[::-1]
    if shape.get("prefix_cache", True) and "num_blocks" not in shape:
        assert [r.cached_tokens for r in again] == [(len(p) - 1) // 4 * 4 for p in PROMPTS[::-1]]
    assert violations(engine.world.state) == []
    assert engine.world.state.pool.num_available == engine.machine.limits.num_blocks


def test_alone_and_staggered_equal_batched(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """A request that arrives alone, or while others run, gets the tokens it would get in a batch."""
    engine = open_engine(folder, small())
    assert [stream_tokens(engine, prompt) for prompt in PROMPTS] == answers
    engine, got, seqs = open_engine(folder, small()), {}, {}
    for i in itertools.count():
        if i % 3 == 0 and i // 3 < len(PROMPTS):
            seqs[engine.add(Request(tuple(PROMPTS[i // 3]), GREEDY))] = i // 3
        elif not engine.unfinished:
            break
        output = engine.step()
        got.update({seqs[done.seq]: done.output for done in output.finished} if output else {})
    assert [got[i] for i in range(len(PROMPTS))] == answers


def stream_tokens(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    """The tokens of a stream, piece by piece."""
    return tuple(token for delta in stream(engine, prompt, GREEDY) for token in delta.token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_seeded_sampling_is_its_own(folder: Path, *, overlap: bool) -> None:
    """Sampled tokens depend on prompt and seed alone: not on batch, order, chunks, preemption or cache."""
    each = [SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=100 + i) for i in range(len(PROMPTS))]
    want = outputs(generate(open_engine(folder, small(overlap=overlap)), PROMPTS, each))
    assert len(set(want)) == len(want)
    for shape in ({"num_blocks": 12}, {"max_num_batched_tokens": 2}, {"max_num_seqs": 2}):
        engine = open_engine(folder, small(overlap=overlap, **shape))
        assert outputs(generate(engine, PROMPTS[::-1], each[::-1])) == want[::-1]
        assert outputs(generate(engine, PROMPTS, each)) == want
    same = generate(open_engine(folder, small()), [PROMPTS[0]] * 3, evolve(each[0], seed=None))
    assert len({r.output_ids for r in same}) > 1, "requests without a seed draw their own"


def test_preempted_sequence_goes_on_where_it_was(folder: Path) -> None:
    """SCH-13: forced out after 4 and after 6 tokens, a sampled sequence still gives the same 8 tokens."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=7, min_tokens=6)
    engine = open_engine(folder, small(overlap=False))
    (want,) = generate(engine, [[1, 2, 3, 4, 5]], params)
    engine = open_engine(folder, small(overlap=False, prefix_cache=False))
    seq = engine.add(Request((1, 2, 3, 4, 5), params))
    starts: list[tuple[int, int]] = []
    done = None
    out = {4, 6}
    while done is None:
        output = engine.step()
        state = engine.world.state
        flight = engine.world.flight
        if flight is not None:
            starts.append((int(flight.plan.start[0]), int(flight.plan.count[0])))
        done = next((one for one in output.finished if one.seq == seq), None) if output is not None else None
        generated = 0 if done else len(tokens_of(state, seq)) - 5
        if generated in out:
            out.discard(generated)
            engine.reset(rewind(engine.world.state, engine.world.state))
    assert done.output == want.output_ids
    assert (0, 9) in starts
    assert (0, 11) in starts


def test_fork_shares_and_diverges(folder: Path) -> None:
    """KV-09: children with their own seeds equal requests of their own; one that ends leaves the others intact."""
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=5)
    engine = open_engine(folder, small(overlap=False))
    parent = engine.add(Request((3, 1, 4, 1, 5, 9), params))
    assert engine.step() is None  # launched; nothing has landed, so the children start from the prompt
    children = engine.fork(parent, (6, 7))
    results: dict[int, tuple[int, ...]] = {}
    used: list[int] = []
    while engine.unfinished:
        output = engine.step()
        used.append(int((engine.world.state.pool.refs > 0).sum()))
        assert violations(engine.world.state) == []
        results.update({done.seq: done.output for done in output.finished} if output else {})
    assert used[0] == 1 + 3
    assert max(used) == 1 + 3 * 2
    for seq, seed in zip((parent, *children), (5, 6, 7), strict=True):
        (alone,) = generate(open_engine(folder, small()), [[3, 1, 4, 1, 5, 9]], evolve(params, seed=seed))
        assert results[seq] == alone.output_ids
    assert len(set(results.values())) > 1
    assert engine.world.state.pool.num_available == 80


def test_nan_logits_fail_one_request(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """A row whose logits are not finite ends with an error; the others in its batch go on."""
    engine = open_engine(folder, small(prefix_cache=False))
    engine.machine.weights.embed[50] = float("nan")
    results = generate(engine, [*PROMPTS[:3], [1, 2, 50], *PROMPTS[3:]], GREEDY)
    assert results[3].finish_reason == "error"
    assert "not finite" in str(results[3].error)
    assert outputs([*results[:3], *results[4:]]) == answers
    assert engine.world.state.pool.num_available == 80


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_in_chunks_whose_logits_are_nan_leaves_no_block_to_be_found(folder: Path, *, overlap: bool) -> None:
    """Its first chunks landed before anything was amiss; once the model is sound the prompt gives what it should."""
    engine = open_engine(folder, small(overlap=overlap, block_size=4, max_num_batched_tokens=4, max_num_seqs=2))
    prompt = [50, *range(1, 12)]
    (right,) = generate(open_engine(folder, small()), [prompt], GREEDY)
    sound = engine.machine.weights.embed[50].clone()
    engine.machine.weights.embed[50] = float("nan")
    for _ in range(2):
        (result,) = generate(engine, [prompt], GREEDY)
        assert (result.finish_reason, result.cached_tokens) == ("error", 0)
        assert len(engine.world.state.pool.keys) == 0
    engine.machine.weights.embed[50] = sound
    assert outputs(generate(engine, [prompt], GREEDY)) == outputs([right])
    assert violations(engine.world.state) == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_raises_fails_its_requests_only(
    folder: Path, answers: list[tuple[int, ...]], at: int, *, overlap: bool
) -> None:
    """Requests of a failed step end with its error, their blocks return, others are served, and a trace agrees."""
    engine = open_engine(folder, small(overlap=overlap, max_num_seqs=4, num_blocks=100))
    calls = itertools.count()
    forward = engine.machine.model.forward

    def broken(*args: object) -> object:
        if next(calls) == at:
            raise RuntimeError("the device fell over")
        return forward(*args)  # pyright: ignore[reportArgumentType]

    engine.machine = evolve(engine.machine, model=evolve(engine.machine.model, forward=broken))
    events: list[tuple[Event, str]] = []
    engine.note = lambda event, state: events.append((event, digest(state)))
    results = generate(engine, PROMPTS, GREEDY)
    failed = [i for i, r in enumerate(results) if r.error is not None]
    assert failed
    assert all("RuntimeError: the device fell over" in str(results[i].error) for i in failed)
    assert len(failed) <= 4
    for i, result in enumerate(results):
        assert i in failed or result.output_ids == answers[i]
    assert engine.world.state.pool.num_available == 100
    assert violations(engine.world.state) == []
    trace = Trace(engine.machine.limits, "throughput", tuple(e for e, _ in events), tuple(d for _, d in events))
    assert verify(trace) is None


def test_refused_prompts_fail_alone(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """SCH-09: an empty prompt, an id outside the vocabulary and one that is too long each name their fault."""
    engine = open_engine(folder, small())
    results = generate(engine, [PROMPTS[0], [], [96], [1] * 256, PROMPTS[1]], GREEDY)
    assert [r.finish_reason for r in results[1:4]] == ["rejected"] * 3
    assert ["no tokens" in str(results[1].error), "96" in str(results[2].error), "256" in str(results[3].error)] == [
        True
    ] * 3
    assert [results[0].output_ids, results[4].output_ids] == [answers[0], answers[1]]
    with pytest.raises(InvalidRequest, match="tokenizer"):
        engine.add(Request(tuple(map(int, next(stream(engine, "words")).token_ids))))


def test_names_are_unique_while_they_live(folder: Path) -> None:
    """SCH-10: a second request of a live name is refused, an abort hits its own one only, and names can be reused."""
    engine = open_engine(folder, small())
    first = engine.add(Request((1, 2), GREEDY), name="x")
    with pytest.raises(InvalidRequest, match="x"):
        engine.add(Request((1, 2), GREEDY), name="x")
    engine.abort(first)
    engine.step()
    second = engine.add(Request((1, 2), GREEDY), name="x")
    engine.abort(first)
    assert second != first
    assert [done.reason for done in run(engine, [second])] == ["length"]
    engine.add(Request((1, 2), GREEDY), name="x")


def test_a_name_is_free_once_its_request_is_gone(folder: Path) -> None:
    """SCH-10: an aborted request holds its name no longer, told or not, nor does one that a rewind has dropped."""
    engine = open_engine(folder, small())
    start = engine.world.state
    aborted = engine.add(Request((1, 2), GREEDY), name="x")
    engine.step()
    engine.abort(aborted)
    second = engine.add(Request((3, 4), GREEDY), name="x")
    assert [done.reason for done in run(engine, [second])] == ["length"]
    dropped = engine.add(Request((1, 2), GREEDY), name="x")
    engine.reset(rewind(start, engine.world.state))
    third = engine.add(Request((1, 2), GREEDY), name="x")
    assert third > dropped
    assert [done.seq for done in run(engine, [third])] == [third]


def test_closing_a_stream_gives_everything_back(folder: Path) -> None:
    """A stream that is closed early aborts its request: row and blocks are free after two more steps."""
    engine = open_engine(folder, small())
    pieces = stream(engine, [1, 2, 3], evolve(GREEDY, max_tokens=100, ignore_eos=True))
    assert len(next(pieces).token_ids) == 1
    pieces.close()
    engine.step()
    engine.step()
    assert not engine.unfinished
    assert engine.world.state.pool.num_available == 80


def test_eos_stop_ids_and_min_tokens(folder: Path) -> None:
    """SMP-11: an end or stop id ends with "stop"; ignore_eos ignores the model's own only; min_tokens waits."""
    engine = open_engine(folder, small())
    (free,) = generate(engine, [PROMPTS[2]], GREEDY)
    stop = free.output_ids[4]
    first = free.output_ids.index(stop)
    (stopped,) = generate(engine, [PROMPTS[2]], evolve(GREEDY, stop_token_ids=(stop,)))
    assert (stopped.output_ids, stopped.finish_reason) == (free.output_ids[: first + 1], "stop")
    engine.machine = evolve(engine.machine, limits=evolve(engine.machine.limits, eos_ids=(stop,)))
    engine.world = World(initial(engine.machine.limits), engine.world.device, None)
    assert generate(engine, [PROMPTS[2]], GREEDY)[0].finish_reason == "stop"
    assert generate(engine, [PROMPTS[2]], evolve(GREEDY, ignore_eos=True))[0].output_ids == free.output_ids
    both = generate(engine, [PROMPTS[2]], evolve(GREEDY, ignore_eos=True, stop_token_ids=(stop,)))
    assert both[0].output_ids == stopped.output_ids
    later = generate(engine, [PROMPTS[2]], evolve(GREEDY, min_tokens=first + 1))[0]
    assert stop not in later.output_ids[: first + 1]
    assert len(later.output_ids) > first + 1


def test_advance_is_the_whole_engine(folder: Path) -> None:
    """The card of the design: a loop of three lines over advance serves a request."""
    engine = open_engine(folder, small())
    world, outputs_seen = engine.world, []
    events: tuple[Event, ...] = (Arrived(Request((5, 6), GREEDY)),)
    for _ in range(20):
        world, output = advance(engine.machine, world, events)
        events = ()
        outputs_seen += [output] if output is not None else []
    assert sum(len(o.tokens) for o in outputs_seen) == len(outputs_seen[-1].finished[0].output)


def test_a_policy_that_serves_nobody_is_told_so(folder: Path) -> None:
    """A user's policy that admits nobody is an error, not a busy loop."""

    def nobody(state: EngineState) -> list[Turn]:
        return []

    engine = open_engine(folder, small(), policy=nobody)
    engine.add(Request((1, 2), GREEDY))
    with pytest.raises(AgentInferError, match="policy"):
        engine.step()


def test_six_hundred_events_replay(folder: Path) -> None:
    """Every state of a recorded run is made again without the model, and its digest agrees."""
    engine = open_engine(folder, small(num_blocks=14))
    events: list[Event] = []
    digests: list[str] = []

    def note(event: Event, state: EngineState) -> None:
        events.append(event)
        digests.append(digest(state))

    engine.note = note
    while len(events) < 600:
        generate(engine, PROMPTS, GREEDY)
    trace = Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))
    assert verify(trace) is None
    assert verify(evolve(trace, digests=(*digests[:300], "0" * 16, *digests[301:]))) == 300
    assert [digest(m.state) for m in replay(trace.limits, trace.events)][1:] == digests


def test_outputs_count_every_token_once(folder: Path) -> None:
    """The tokens of all outputs of a run are those of the finished sequences, each once."""
    engine = open_engine(folder, small(num_blocks=12))
    seqs = [engine.add(Request(tuple(p), GREEDY)) for p in PROMPTS]
    told: dict[int, list[int]] = {seq: [] for seq in seqs}
    done: dict[int, tuple[int, ...]] = {}
    while engine.unfinished:
        output = engine.step()
        if output is not None:
            for seq, token in zip(output.seqs.tolist(), output.tokens.tolist(), strict=True):
                told[seq].append(token)
            done.update({one.seq: one.output for one in output.finished})
    assert {seq: tuple(tokens) for seq, tokens in told.items()} == done
    assert np.all([len(tokens) for tokens in told.values()])


@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_leaves_an_engine_that_goes_on(
    folder: Path, answers: list[tuple[int, ...]], *, overlap: bool
) -> None:
    """A KeyboardInterrupt in a step loses nothing: the answers are the same, all outputs tell them, a trace agrees."""
    engine = open_engine(folder, small(overlap=overlap, max_num_seqs=4))
    engine.note = recording = Recording()
    calls = itertools.count()
    forward = engine.machine.model.forward

    def interrupted(*args: object) -> object:
        result = forward(*args)  # pyright: ignore[reportArgumentType]
        if next(calls) in (1, 5, 6, 20):
            raise KeyboardInterrupt
        return result

    engine.machine = evolve(engine.machine, model=evolve(engine.machine.model, forward=interrupted))
    seqs = [engine.add(Request(tuple(prompt), GREEDY)) for prompt in PROMPTS]
    done, told, interrupts = stepped(engine, KeyboardInterrupt)
    assert interrupts == 4
    assert [done[seq] for seq in seqs] == [told[seq] for seq in seqs] == answers
    assert recording.difference(engine) is None
    assert recording.digests[-1] == digest(engine.world.state)


def stepped(
    engine: Engine, expected: type[BaseException]
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]], int]:
    """Step to the end: what the ends tell, what the outputs' tokens tell, and how often *expected* was raised."""
    done: dict[int, tuple[int, ...]] = {}
    told: dict[int, tuple[int, ...]] = {}
    raised = 0
    while engine.unfinished:
        try:
            output = engine.step()
        except expected:
            raised += 1
            continue
        if output is not None:
            for seq, token in zip(output.seqs.tolist(), output.tokens.tolist(), strict=True):
                told[seq] = (*told.get(seq, ()), token)
            done.update({one.seq: one.output for one in output.finished})
    return done, told, raised


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("culprit", ["policy", "note"])
def test_a_policy_or_note_that_raises_loses_nothing(
    folder: Path, answers: list[tuple[int, ...]], culprit: str, *, overlap: bool
) -> None:
    """What a policy or a note raises comes out of step; after it all tokens come, and a trace that was told agrees."""
    calls, recording = itertools.count(), Recording()

    def moody(name: str, times: set[int]) -> None:
        if name == culprit and next(calls) in times:
            raise ZeroDivisionError

    def policy(state: EngineState) -> Iterator[Turn]:
        moody("policy", {0, 3, 4, 9})
        return iter(POLICIES["throughput"](state))

    def note(event: Event, state: EngineState) -> None:
        if not isinstance(event, Arrived):
            moody("note", {0, 3, 4, 9})
        recording(event, state)

    engine = open_engine(folder, small(overlap=overlap), policy=policy, note=note)
    seqs = [engine.add(Request(tuple(prompt), GREEDY)) for prompt in PROMPTS]
    done, told, raised = stepped(engine, ZeroDivisionError)
    assert raised == 4
    assert [done[seq] for seq in seqs] == [told[seq] for seq in seqs] == answers
    assert recording.difference(engine) is None


def test_what_is_not_live_can_not_be_waited_for(folder: Path) -> None:
    """To wait for an unknown sequence, an ended, a rewound or an awaited one is an error that names it."""
    engine = open_engine(folder, small())
    start = engine.world.state
    ended = engine.add(Request((1, 2), GREEDY))
    assert [done.seq for done in run(engine, [ended])] == [ended]
    dropped = engine.add(Request((1, 2), GREEDY))
    engine.step()
    engine.reset(rewind(start, engine.world.state))
    for seq in (SeqId(99), ended, dropped):
        with pytest.raises(AgentInferError, match=f"sequence {seq} "):
            next(run(engine, [seq]))
    live = engine.add(Request((1, 2), GREEDY))
    pieces = stream(engine, [3, 4], GREEDY)
    next(pieces)
    with pytest.raises(AgentInferError, match="sequence 99 "):
        next(run(engine, [live, SeqId(99)]))
    with pytest.raises(AgentInferError, match=f"sequence {live + 1} .*waits"):
        next(run(engine, [SeqId(live + 1)]))
    engine.reset(rewind(start, engine.world.state))
    with pytest.raises(AgentInferError, match=f"sequence {live + 1} "):
        list(pieces)


def test_a_run_whose_sequence_is_rewound_away_says_so(folder: Path) -> None:
    """A run that goes on after a rewind has dropped what it waits for names it, though others go on."""
    engine = open_engine(folder, small())
    start = engine.world.state
    short, long = (engine.add(Request((1, 2), evolve(GREEDY, max_tokens=n))) for n in (1, 9))
    waiting = run(engine, [short, long])
    assert next(waiting).seq == short
    engine.reset(rewind(start, engine.world.state))
    engine.add(Request((5, 5), GREEDY))
    with pytest.raises(AgentInferError, match=f"sequence {long} "):
        next(waiting)
    assert engine.unfinished


def test_who_waits_gets_what_is_theirs(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """Streams in turns, a generate in the middle of them and a loop of one's own share an engine, and each gets all."""
    engine = open_engine(folder, small(max_num_seqs=4))
    own = engine.add(Request(tuple(PROMPTS[0]), GREEDY))
    aborted = engine.add(Request(tuple(PROMPTS[5]), evolve(GREEDY, max_tokens=100, ignore_eos=True)))
    streams = [stream(engine, prompt, GREEDY) for prompt in PROMPTS[1:4]]
    heard = [list(next(pieces).token_ids) for pieces in streams]
    engine.abort(aborted)
    assert outputs(generate(engine, PROMPTS[3:], GREEDY)) == answers[3:]
    left = dict(enumerate(streams))
    while left:
        for i, pieces in list(left.items()):
            delta = next(pieces)
            heard[i] += delta.token_ids
            if delta.result is not None:
                assert delta.result.output_ids == tuple(heard[i])
                del left[i]
    assert [tuple(tokens) for tokens in heard] == answers[1:4]
    done, told, _ = stepped(engine, ZeroDivisionError)
    assert done == told == {own: answers[0], aborted: done[aborted]}
    assert 0 < len(done[aborted]) < 100
    assert not engine.boxes


def test_an_end_that_others_have_stepped_over_is_still_told(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """A sequence that ended while somebody else drove the engine can be waited for afterwards."""
    engine = open_engine(folder, small())
    seq = engine.add(Request(tuple(PROMPTS[0]), evolve(GREEDY, max_tokens=2)))
    generate(engine, PROMPTS[1:2], GREEDY)
    (done,) = run(engine, [seq])
    assert done.output == answers[0][:2]
    assert not engine.unfinished


def test_a_stream_that_is_closed_leaves_nothing_kept(folder: Path) -> None:
    """The end of a closed stream is nobody's: it is not kept, however many there are."""
    engine = open_engine(folder, small())
    for _ in range(3):
        with closing(stream(engine, [1, 2, 3], GREEDY)) as pieces:
            next(pieces)
    generate(engine, PROMPTS[:1], GREEDY)
    assert not engine.kept
    assert not engine.boxes
    assert not engine.unfinished


def test_seeds_of_a_fork_are_checked_before_anything_happens(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """A seed that no request could have is an InvalidRequest of fork, and the engine goes on."""
    engine = open_engine(folder, small())
    seq = engine.add(Request(tuple(PROMPTS[0]), GREEDY))
    engine.step()
    for seeds in ((2**63,), (-5,), (1.5,), ("3",), 5):
        with pytest.raises(InvalidRequest, match="seeds"):
            engine.fork(seq, seeds)
    assert [done.output for done in run(engine, [seq])] == answers[:1]


def test_only_a_state_whose_kv_is_there_can_be_gone_on_from(folder: Path) -> None:
    """Reset refuses a state of another step, and one in which sequences run; rewind makes one of either."""
    engine = open_engine(folder, small())
    idle = engine.world.state
    seq = engine.add(Request(tuple(PROMPTS[0]), GREEDY))
    engine.step()
    engine.step()
    running = engine.world.state
    engine.step()
    for state in (idle, running, engine.world.state):
        with pytest.raises(AgentInferError, match="rewind"):
            engine.reset(state)
    engine.reset(rewind(running, engine.world.state))
    assert [done.reason for done in run(engine, [seq])] == ["length"]


@pytest.mark.parametrize("bad", [7, None])
def test_a_prompt_of_a_wrong_kind_fails_alone(folder: Path, answers: list[tuple[int, ...]], bad: object) -> None:
    """What is neither text nor token ids is a refused prompt, and so are parameters that are none; the others go on."""
    engine = open_engine(folder, small())
    found = generate(engine, [PROMPTS[0], bad, PROMPTS[1]], GREEDY)
    assert [r.finish_reason for r in found] == ["length", "rejected", "length"]
    assert f"prompt: must be text or token ids, not {bad}" in str(found[1].error)
    assert outputs([found[0], found[2]]) == answers[:2]
    assert generate(engine, [[1]], [bad])[0].finish_reason == "rejected"


def test_a_prompt_that_raises_queues_nothing(folder: Path) -> None:
    """If a prompt's own iteration raises, no prompt of the call has been queued."""

    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    engine = open_engine(folder, small())
    with pytest.raises(ZeroDivisionError):
        generate(engine, [PROMPTS[0], broken()], GREEDY)
    assert not engine.unfinished
