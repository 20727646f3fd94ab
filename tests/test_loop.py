"""The loop over a real (tiny) model: whatever the engine does on the way, the tokens are the model's own."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from agentinfer.build import Settings
from agentinfer.errors import AgentInferError, InvalidRequest
from agentinfer.loop import Engine, Result, World, advance, generate, open_engine, run, stream
from agentinfer.ops.inputs import by_hand
from agentinfer.ops.kv import allocate
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, initial, tokens_of
from agentinfer.state.event import Arrived, Event
from agentinfer.state.history import replay, rewind
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
    """A KeyboardInterrupt in the middle of a step loses nothing: stepping on gives the same answers."""
    engine = open_engine(folder, small(overlap=overlap, max_num_seqs=4))
    calls = itertools.count()
    forward = engine.machine.model.forward

    def interrupted(*args: object) -> object:
        result = forward(*args)  # pyright: ignore[reportArgumentType]
        if next(calls) in (1, 5, 6, 20):
            raise KeyboardInterrupt
        return result

    engine.machine = evolve(engine.machine, model=evolve(engine.machine.model, forward=interrupted))
    seqs = [engine.add(Request(tuple(prompt), GREEDY)) for prompt in PROMPTS]
    done: dict[int, tuple[int, ...]] = {}
    interrupts = 0
    while engine.unfinished:
        try:
            output = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        done.update({one.seq: one.output for one in output.finished} if output else {})
    assert interrupts == 4
    assert [done[seq] for seq in seqs] == answers
