"""Edited logits in a running engine: whatever it does on the way, the tokens are those of the rules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentinfer import graphs
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, advance, generate, open_engine
from agentinfer.ops.inputs import by_hand, remember, stage
from agentinfer.ops.kv import allocate
from agentinfer.ops.sample import choose, idle, sample, survivors
from agentinfer.sampling import Host, Processor
from agentinfer.state.check import violations
from agentinfer.state.engine import tokens_of
from agentinfer.state.event import Raised
from agentinfer.state.history import rewind
from agentinfer.state.ids import SeqId
from agentinfer.state.plan import Plan
from agentinfer.state.request import Request, SamplingParams
from agentinfer.steps import Device, Flight, decode_step, land, prefill_step
from plain import edited_plainly
from test_loop import Recording, small, stepped
from test_ranks import SETTINGS, threads, together
from tiny import write_tiny

VOCAB = 96


def parity(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Even tokens at even places, odd ones at odd places."""
    logits[torch.arange(VOCAB) % 2 != len(tokens) % 2] = float("-inf")
    return logits


def steps_up(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Tokens above the last one are likelier."""
    return logits + (torch.arange(VOCAB) > tokens[-1]) * 3.0


PROCESSORS: Mapping[str, Processor] = MappingProxyType({"parity": parity, "steps_up": steps_up})
ASKED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 0.7, "frequency_penalty": -1.0, "top_k": 12},
    {"logit_bias": {5: 3.0, 7: -100, 90: 4.0}, "min_tokens": 4},
    {"allowed_token_ids": [3, 5, 8, 13, 21, 34], "bad_words": [[3, 5], [5, 5], [8]]},
    {"bad_words": [[i, i] for i in range(VOCAB)], "temperature": 0.3, "min_tokens": 3, "stop_token_ids": [40, 41]},
    {"logits_processors": "parity", "top_p": 0.9},
    {"logits_processors": ("steps_up", "parity"), "presence_penalty": 2.0, "temperature": 0.0},
    {},
)
PROMPTS = [[(7 * i + j * j) % 50 + 1 for j in range(3 + 5 * (i % 4))] for i in range(len(ASKED))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def opened(folder: Path, **changes: Any) -> Engine:
    return open_engine(folder, small(**changes), processors=PROCESSORS)


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": i, **ASKED[i], **more})


def naive(engine: Engine, request: Request) -> tuple[int, ...]:
    """The tokens by the rules, everything computed anew for each."""
    m, p, tokens = engine.machine, request.params, list(request.prompt)
    ends = {*m.limits.eos_ids, *p.stop_token_ids}
    assert p.max_tokens is not None
    for index in range(p.max_tokens):
        kv = allocate([layer.layout for layer in engine.world.device.kv.layers], 64, 1, 64, m.ranks.device)
        x, kv = by_hand(kv, [tokens], [0], [list(range(1, 65))])
        held = ends if index < p.min_tokens else ()
        logits = edited_plainly(prefill_step(m, kv, x)[0][0], request, tokens, held, None, PROCESSORS)
        if p.temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(choose(*survivors(logits, p.temperature, p.top_k, p.top_p, p.min_p), p.seed or 0, index))
        if tokens[-1] in ends:
            break
    return tuple(tokens[len(request.prompt) :])


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[int, ...]]:
    """The naive ones."""
    engine = opened(folder)
    return [naive(engine, Request(tuple(prompt), params(i))) for i, prompt in enumerate(PROMPTS)]


def outputs(engine: Engine, order: Sequence[int] = range(len(ASKED))) -> list[tuple[int, ...]]:
    """What *engine* answers, in the order of ASKED."""
    results = generate(engine, [PROMPTS[i] for i in order], [params(i) for i in order])
    assert all(result.error is None for result in results), results
    found = dict(zip(order, (result.output_ids for result in results), strict=True))
    assert violations(engine.world.state) == []
    return [found[i] for i in sorted(found)]


# --- the tokens are those of the rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"max_num_batched_tokens": 2},
        {"max_num_seqs": 2},
        {"num_blocks": 12},
        {"policy": "reserve", "block_size": 1},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_rules(
    folder: Path, answers: list[tuple[int, ...]], shape: dict[str, Any], *, overlap: bool
) -> None:
    """Penalties, bias, allowed ids, bad words and processors in one batch: chunked, in few rows, in few blocks (so
    preempted), and then in another order with all prompts cached.
    """
    engine = opened(folder, overlap=overlap, **shape)
    assert outputs(engine) == answers
    assert outputs(engine, range(len(ASKED))[::-1]) == answers


def test_each_alone_gives_what_it_gives_in_a_batch(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """The batch is nothing to a request."""
    engine = opened(folder)
    assert [outputs(engine, [i])[0] for i in range(len(ASKED))] == answers
    assert len({*answers}) == len(answers)


def test_preemption_happens_and_counts_survive_it(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """In a pool for one long sequence somebody is preempted in the middle of its output; tokens stay."""
    engine = opened(folder, num_blocks=13, prefix_cache=False)
    cut: list[int] = []

    def note(_event: object, state: Any) -> None:
        cut.extend(len(w.tokens) - len(w.request.prompt) for w in state.requeued)

    engine.note = note
    assert outputs(engine) == answers
    assert max(cut) > 2


@pytest.mark.parametrize("i", range(len(ASKED)))
def test_forks_go_on_with_what_their_parent_had_said(folder: Path, i: int) -> None:
    """A child with the parent's seed gives the parent's tokens, forked in the prompt or in the middle of the output;
    one with another seed, forked in the prompt, those of a request of its own.
    """
    engine = opened(folder)
    want = naive(engine, Request(tuple(PROMPTS[i]), params(i)))
    other = naive(engine, Request(tuple(PROMPTS[i]), params(i, seed=77)))
    seq = engine.add(Request(tuple(PROMPTS[i]), params(i)))
    engine.step()
    same, different = engine.fork(seq, (None, 77))
    done: dict[int, tuple[int, ...]] = {}
    later: list[int] = []
    while engine.unfinished:
        output = engine.step()
        done.update({one.seq: one.output for one in output.finished} if output else {})
        if not later and seq not in done and len(tokens_of(engine.world.state, seq)) >= len(PROMPTS[i]) + 4:
            later += engine.fork(seq)
    assert [done[seq], done[same], done[later[0]]] == [want] * 3
    assert done[different] == other


def test_a_rewound_engine_says_the_same_again(folder: Path, answers: list[tuple[int, ...]]) -> None:
    """Back to an earlier state, twice, and on from there: the counts are those of the tokens it had then."""
    engine = opened(folder)
    seqs = [engine.add(Request(tuple(prompt), params(i))) for i, prompt in enumerate(PROMPTS[:8])]
    for _ in range(6):
        engine.step()
    old = engine.world.state
    for _ in range(2):
        for _ in range(3):
            engine.step()
        engine.reset(rewind(old, engine.world.state))
    done: dict[int, tuple[int, ...]] = {}
    while engine.unfinished:
        output = engine.step()
        done.update({one.seq: one.output for one in output.finished} if output else {})
    assert [done[seq] for seq in seqs] == answers[:8]


def test_a_seeded_request_stays_itself(folder: Path) -> None:
    """Drawn requests in a drawn engine, some forked or preempted: each gives what it gives alone, in turn."""
    alone = opened(folder, overlap=False, prefix_cache=False)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        few = st.integers(0, 9)
        asked = [
            Request(
                tuple(data.draw(st.lists(few, min_size=1, max_size=9))),
                SamplingParams(
                    max_tokens=data.draw(st.integers(1, 7)), seed=data.draw(st.integers(0, 3)), ignore_eos=True,
                    temperature=data.draw(st.sampled_from([0.0, 0.8])), top_k=data.draw(st.sampled_from([0, 8])),
                    repetition_penalty=data.draw(st.sampled_from([1.0, 1.6])),
                    frequency_penalty=data.draw(st.sampled_from([0.0, 1.2, -1.2])),
                    logit_bias=data.draw(st.dictionaries(few, st.sampled_from([6, -6]), max_size=3)),
                    bad_words=data.draw(st.lists(st.lists(few, min_size=1, max_size=2), max_size=3)),
                    logits_processors=data.draw(st.sampled_from([(), (), "parity"])),
                ),
            )
            for _ in range(data.draw(st.integers(1, 4)))
        ]  # fmt: skip
        engine = opened(
            folder, num_blocks=data.draw(st.sampled_from([7, 40])), overlap=data.draw(st.booleans()),
            max_num_batched_tokens=data.draw(st.sampled_from([1, 5, 64])), prefix_cache=data.draw(st.booleans()),
            max_num_seqs=data.draw(st.sampled_from([2, 8])), max_model_len=20,
        )  # fmt: skip
        seqs = [engine.add(request) for request in asked]
        if data.draw(st.booleans()):
            for _ in range(data.draw(st.integers(0, 4))):
                engine.step()
            for i, child in enumerate([engine.fork(seq) for seq in list(seqs)]):
                seqs += child
                asked += [asked[i]] * len(child)
        done, _, _ = stepped(engine, KeyboardInterrupt)
        known = {seq: done[seq] for seq in seqs if seq in done}
        for seq, request in zip(seqs, asked, strict=True):
            if seq in known:
                (want,) = generate(alone, [request.prompt], request.params)
                assert known[seq] == want.output_ids

    check()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_what_a_graph_chose_is_chosen_again_where_logits_are_edited(
    folder: Path, answers: list[tuple[int, ...]], *, overlap: bool
) -> None:
    """A stand-in for captured graphs, which compute rows in an order of their own and hold more rows than the plan: of
    samples that are edited only the logits are used.
    """
    engine = opened(folder, overlap=overlap)
    m, replayed = engine.machine, list[int]()

    def replay(device: Device, plan: Plan) -> tuple[Flight, Device] | None:
        rows = len(plan.rows)
        if not rows == len(plan.samples) == len(plan.slots):
            return None
        x, kv = stage(plan, device.kv, device.last)
        logits_SV, kv = decode_step(m, kv, x)
        places = np.random.default_rng(plan.step).permutation(rows).astype(np.int32)
        logits = torch.full((rows + 3, VOCAB), float("nan"))
        logits[:rows] = logits_SV[torch.from_numpy(places).long()]
        left = graphs.left_of(m, plan)
        tokens, ok = sample(logits_SV, idle(plan.sampling, sum(left, ())))
        chosen = torch.zeros((2, rows + 3), dtype=torch.int64)
        chosen[0, :rows], chosen[1, :rows] = tokens, ok
        device = Device(kv, remember(device.last, x, tokens), device.edits)
        replayed.append(rows)
        return graphs._after(m, logits, chosen, device, plan, places, *left)

    engine.machine = evolve(m, replay=replay)
    assert outputs(engine) == answers
    assert outputs(engine, range(len(ASKED))[::-1]) == answers
    assert max(replayed) == 8


@pytest.mark.parametrize("bad", [{"logit_bias": {96: 1}}, {"stop_token_ids": [96]}, {"allowed_token_ids": [1, 96]}])
def test_ids_that_no_logit_has_harm_nobody(folder: Path, answers: list[tuple[int, ...]], bad: dict[str, Any]) -> None:
    """SMP-09: refused alone, naming field and id; the tokens of its neighbours are those without it."""
    engine = opened(folder)
    wrong = SamplingParams(max_tokens=3, min_tokens=1, **bad)
    results = generate(engine, [PROMPTS[0], [1], PROMPTS[1]], [params(0), wrong, params(1)])
    assert results[1].finish_reason == "rejected"
    assert str(results[1].error).startswith(f"{next(iter(bad))}: token id 96 ")
    assert [results[0].output_ids, results[2].output_ids] == answers[:2]


def test_every_end_token_ends_and_only_those_asked_for(tmp_path: Path) -> None:
    """SMP-11: forced by a bias of 100, each end token of the checkpoint ends the output unless ends are ignored; a stop
    token of the request ends it all the same.
    """
    folder = write_tiny(tmp_path, eos_token_id=[90, 91])
    engine = opened(folder)

    def said(token: int, **more: Any) -> tuple[tuple[int, ...], str, object]:
        asked = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={token: 100}, **more)
        (result,) = generate(engine, [[1, 2, 3]], asked)
        return result.output_ids, result.finish_reason, result.stop_reason

    assert said(90) == ((90,), "stop", 90)
    assert said(91) == ((91,), "stop", 91)
    assert said(91, ignore_eos=True) == ((91,) * 3, "length", None)
    assert said(93, ignore_eos=True, stop_token_ids=[93]) == ((93,), "stop", 93)
    ids, reason, why = said(90, min_tokens=2)
    assert (len(ids), ids[2], reason, why) == (3, 90, "stop", 90)
    assert 90 not in ids[:2]


# --- rows that need the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("budget", [2, 64])
def test_a_mask_sees_every_token_before_its_own_and_rules_alone(folder: Path, budget: int, *, overlap: bool) -> None:
    """A mask that allows one token, a function of all before it, makes a whole output its own; it is asked once for
    each, and rows that do not need the host are as without it.
    """
    calls: list[tuple[SeqId, tuple[int, ...]]] = []

    def mask(seq: SeqId, request: Request, tokens: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        calls.append((seq, tokens))
        if request.params.seed == 1:
            return None
        words = np.zeros(3, np.uint32)
        allowed = sum(tokens) % 89
        words[allowed // 32] = 1 << (allowed % 32)
        return words.view(np.int32)

    engine = opened(folder, overlap=overlap, max_num_batched_tokens=budget)
    engine.machine = evolve(engine.machine, host=Host({"as it is": lambda _, logits: logits}, mask))
    asked = [SamplingParams(max_tokens=9, seed=i, logits_processors="as it is") for i in range(2)]
    plain = SamplingParams(max_tokens=9, seed=1)
    prompts = [[1, 2, 3], [4, 5], [4, 5]]
    masked, free, other = generate(engine, prompts, [*asked, plain])
    tokens = [1, 2, 3]
    for _ in range(9):
        tokens.append(sum(tokens) % 89)
    assert list(masked.output_ids) == tokens[3:]
    assert free.output_ids == other.output_ids
    assert [got for seq, got in calls if seq == 0] == [tuple(tokens[:n]) for n in range(3, 12)]


def test_rows_that_need_no_host_do_not_wait_for_it(folder: Path) -> None:
    """While a processor runs, the other rows of its step have been chosen; the step before has landed."""
    seen: list[int] = []
    engine = opened(folder)

    def look(tokens: Sequence[int], logits: Tensor) -> Tensor:
        assert tokens[-1] == 33 or len(tokens) == 3
        seen.append(int(engine.world.device.last.count_nonzero()))
        logits[33] = 1e4
        return logits

    engine.machine = evolve(engine.machine, host=Host({"look": look}))
    asked = [SamplingParams(max_tokens=5, seed=0, logits_processors="look"), SamplingParams(max_tokens=5, seed=0)]
    results = generate(engine, [[1, 2, 3], [4, 5, 6]], asked)
    assert results[0].output_ids == (33,) * 5
    assert min(seen) >= 1


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("who", ["processor", "mask", "mask of no shape", "shape", "kind"])
def test_what_raises_on_the_host_fails_its_request_alone(
    folder: Path, answers: list[tuple[int, ...]], at: int, who: str, *, overlap: bool
) -> None:
    """It ends with the error and the tokens it had, blocks return, the others are served, and a trace agrees."""

    def broken(tokens: Sequence[int], logits: Tensor) -> Any:
        if len(tokens) >= at and "mask" not in who:
            if who == "processor":
                raise ZeroDivisionError("mine")
            return logits[1:] if who == "shape" else None
        return logits

    def mask(_seq: SeqId, request: Request, tokens: tuple[int, ...]) -> Any:
        if "mask" not in who or len(tokens) < at or "broken" not in request.params.logits_processors:
            return None
        if who == "mask":
            raise ZeroDivisionError("mine")
        return np.zeros(4, np.int32)

    engine = opened(folder, overlap=overlap)
    engine.machine = evolve(engine.machine, host=Host({**PROCESSORS, "broken": broken}, mask))
    engine.note = recording = Recording()
    bad = SamplingParams(max_tokens=9, seed=5, logits_processors="broken")
    results = generate(
        engine, [*PROMPTS[:4], [1, 2, 3], *PROMPTS[4:]], [*map(params, range(4)), bad, *map(params, range(4, 9))]
    )
    failed = results.pop(4)
    assert failed.finish_reason == "error"
    assert len(failed.output_ids) == at - 3
    words = {
        "processor": "logits processor 'broken': ZeroDivisionError: mine",
        "mask": "ZeroDivisionError: mine",
        "mask of no shape": "ValueError: a mask of int32 (4,), not int32 (3,)",
        "shape": "logits processor 'broken': RuntimeError",
        "kind": "logits processor 'broken': AttributeError",
    }
    assert str(failed.error).startswith(words[who])
    assert [r.output_ids for r in results] == answers
    assert engine.world.state.pool.num_available == 80
    assert sum(isinstance(event, Raised) for event in recording.events) == 1
    assert recording.difference(engine) is None


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_logits_that_a_processor_spoils_fail_its_request_alone(
    folder: Path, answers: list[tuple[int, ...]], value: float
) -> None:
    """NaN, or nothing left, is an error in words, and no block of it is remembered."""
    engine = opened(folder)
    spoil = {"spoil": lambda _, logits: logits.fill_(value)}
    engine.machine = evolve(engine.machine, host=Host({**PROCESSORS, **spoil}))
    results = generate(engine, [[1] * 9, *PROMPTS], [SamplingParams(logits_processors="spoil"), *map(params, range(9))])
    assert results[0].finish_reason == "error"
    assert "no token is left to choose, or the logits are not finite" in str(results[0].error)
    assert [r.output_ids for r in results[1:]] == answers
    (again,) = generate(engine, [[1] * 9], SamplingParams(max_tokens=1))
    assert again.cached_tokens == 0


@pytest.mark.parametrize("asked", [{"logit_bias": {3: 1}}, {"bad_words": [[3]]}, {"frequency_penalty": 1}])
def test_logits_that_are_not_finite_fail_an_edited_request_alone(folder: Path, asked: dict[str, Any]) -> None:
    """NaN of the model stays NaN, whatever is asked; its neighbour is served."""
    engine = opened(folder)
    engine.machine.weights.embed[50] = float("nan")
    wrong, right = generate(engine, [[1, 2, 50], [1, 2, 3]], SamplingParams(max_tokens=3, seed=1, **asked))
    assert wrong.finish_reason == "error"
    assert right.error is None


def test_an_unknown_processor_is_refused_by_name(folder: Path) -> None:
    """The request that names it fails alone, and the error says which there are."""
    engine = opened(folder)
    wrong, right = generate(engine, [[1], [2]], [params(8, logits_processors="no such"), params(8)])
    assert wrong.finish_reason == "rejected"
    assert "logits_processors: 'no such' is none that the engine was opened with (parity, steps_up)" in str(wrong.error)
    assert right.error is None
    with pytest.raises(InvalidRequest, match="none"):
        open_engine(folder, small()).add(Request((1,), SamplingParams(logits_processors="mine")))


def test_a_step_that_waits_for_the_host_can_not_land(folder: Path) -> None:
    """A loop that forgets `finish` is told so."""
    engine = opened(folder)
    engine.add(Request((1, 2), params(6)))
    flights: list[Any] = []
    machine = evolve(engine.machine, host=Host({"parity": lambda tokens, logits: logits}))

    def keep(*given: Any) -> Any:
        flights.append(given)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentinfer.turn.finish", keep)
        with pytest.raises(KeyboardInterrupt):
            advance(machine, engine.world)
    with pytest.raises(ValueError, match="step 0 has samples that wait for the host"):
        land(flights[0][2])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_an_interrupt_in_a_processor_loses_nothing(
    folder: Path, answers: list[tuple[int, ...]], *, overlap: bool
) -> None:
    """The step is made again: counts are not doubled, the tokens are the same, and a trace agrees."""
    calls = itertools.count()

    def interrupted(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if next(calls) in (0, 3, 4, 9):
            raise KeyboardInterrupt
        return parity(tokens, logits)

    engine = opened(folder, overlap=overlap)
    engine.machine = evolve(engine.machine, host=Host({**PROCESSORS, "parity": interrupted}))
    engine.note = recording = Recording()
    seqs = [engine.add(Request(tuple(prompt), params(i))) for i, prompt in enumerate(PROMPTS)]
    done, told, interrupts = stepped(engine, KeyboardInterrupt)
    assert interrupts == 4
    assert [done[seq] for seq in seqs] == [told[seq] for seq in seqs] == answers
    assert recording.difference(engine) is None


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("at", [2, 9])
def test_a_device_that_raises_while_it_chooses_fails_its_step(folder: Path, at: int, *, overlap: bool) -> None:
    """In `finish`, as in `launch`: the requests of that step end with the error, others are served, a trace agrees."""
    engine = opened(folder, overlap=overlap, max_num_seqs=4)
    calls, sample = itertools.count(), engine.machine.ops.sample

    def broken(*given: Any) -> Any:
        if next(calls) == at:
            raise RuntimeError("the device fell over")
        return sample(*given)

    engine.machine = evolve(engine.machine, ops=evolve(engine.machine.ops, sample=broken))
    engine.note = recording = Recording()
    asked = [SamplingParams(max_tokens=6, seed=i, logits_processors="parity", presence_penalty=1) for i in range(8)]
    results = generate(engine, PROMPTS[:8], asked)
    want = generate(opened(folder), PROMPTS[:8], asked)
    failed = [r for r in results if r.error is not None]
    assert 1 <= len(failed) <= 4
    assert all("the device fell over" in str(r.error) for r in failed)
    for result, whole in zip(results, want, strict=True):
        assert result.error is not None or result.output_ids == whole.output_ids
    assert recording.difference(engine) is None
    assert violations(engine.world.state) == []
    assert engine.world.state.pool.num_available == 80


def test_several_ranks_edit_as_one(folder: Path) -> None:
    """Penalties, bias and bad words on two ranks, of which rank 0 alone asks its host; a processor that raises there
    ends its request on all.
    """
    asked = [params(i, max_tokens=9) for i in (0, 1, 3, 4, 5, 6)]
    asked.append(SamplingParams(max_tokens=9, seed=1, logits_processors="broken"))
    prompts = PROMPTS[: len(asked)]

    def broken(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if len(tokens) > len(prompts[6]) + 3:
            raise ZeroDivisionError
        return logits

    def drive(engine: Engine) -> Any:
        engine.machine = evolve(engine.machine, host=Host({**PROCESSORS, "broken": broken}))
        return generate(engine, prompts, asked)

    want = drive(open_engine(folder, SETTINGS))
    found, _ = together(folder, 2, threads, drive)
    assert [(r.output_ids, r.error) for r in found] == [(r.output_ids, r.error) for r in want]
    assert "ZeroDivisionError" in str(want[6].error)
