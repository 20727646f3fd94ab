"""Speculative decoding over tiny models: the tokens are those of plain decoding, or distributed as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import toys
from agentinfer import loop
from agentinfer.build import Settings
from agentinfer.errors import AgentInferError, InvalidSetting
from agentinfer.loop import Engine, open_engine, stream
from agentinfer.ops.sample import probabilities
from agentinfer.scoring import score
from agentinfer.speculative import (
    Drafted,
    Propose,
    Tally,
    advance_speculative,
    draft_model,
    generate,
    lookup,
    ngram,
    speculating,
)
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, has_work, live
from agentinfer.state.event import Arrived, Event
from agentinfer.state.ids import ints
from agentinfer.state.plan import Plan
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.speculate import room, speculate
from agentinfer.state.trace import Trace, verify
from tiny import write_tiny

PROMPTS = [[1, 2, 3] * 5, [7, 8, 9, 10], [5] * 9, list(range(30)), [1, 2, 3] * 5 + [4], [60, 61]]
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(0, 90, 3))},
    {"temperature": 1.1, "min_p": 0.02, "stop_token_ids": (3, 4)},
    {"temperature": 0.7, "presence_penalty": 0.5},
)
PARAMS = [SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **how) for i, how in enumerate(WAYS)]


def small(folder: Path, note: Any = None, **changes: Any) -> Engine:
    """An engine with room for 8 sequences."""
    base = Settings(block_size=4, num_blocks=120, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, seed=0)
    engine = open_engine(folder, evolve(base, **changes))
    if note is not None:
        engine.note = note
    return engine


def wrong(state: EngineState, plan: Plan) -> Drafted:
    """Guesses that are nearly always wrong."""
    return Drafted(*speculate(state, plan, dict.fromkeys(room(state, plan), (41, 42, 43))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of another shape that knows the same tokens."""
    return write_tiny(tmp_path_factory.mktemp("other"), hidden_size=32, num_hidden_layers=1, head_dim=8)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that nearly agrees with the first."""

    def blur(tensors: dict[str, torch.Tensor]) -> None:
        noise = torch.Generator().manual_seed(1)
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=noise), alpha=0.02)

    return write_tiny(tmp_path_factory.mktemp("near"), blur)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[int, ...]]:
    """What plain decoding gives."""
    return [result.output_ids for result in loop.generate(small(folder), PROMPTS, PARAMS)]


# --- n-grams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "n", "k", "want"),
    [
        ((1, 2, 3, 4, 1, 2), 2, 3, (3, 4, 1)),
        ((1, 2, 3, 4, 1, 2), 2, 9, (3, 4, 1, 2, 3, 4, 1, 2, 3)),
        ((1, 2, 5, 1, 2, 6, 1, 2), 2, 2, (6, 1)),
        ((7, 7, 7, 7), 3, 4, (7, 7, 7, 7)),
        ((1, 2, 3), 1, 4, ()),
        ((1, 2, 3), 3, 4, ()),
        ((1, 2), 3, 4, ()),
        ((), 1, 1, ()),
        ((5, 5), 1, 2, (5, 5)),
        ((1, 2, 3, 1, 2, 3), 3, 0, ()),
    ],
)
def test_lookup(tokens: tuple[int, ...], n: int, k: int, want: tuple[int, ...]) -> None:
    """What followed the last earlier occurrence of the last n tokens, continued with itself."""
    assert lookup(tokens, n, k) == want


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_lookup_is_the_slow_search(tokens: list[int], n: int, k: int) -> None:
    """The same as trying every earlier place from the last on, and copying token by token."""
    want: list[int] = []
    for start in range(len(tokens) - n - 1, -1, -1):
        if tokens[start : start + n] == tokens[len(tokens) - n :]:
            copied = list(tokens)
            for i in range(k):
                copied.append(copied[start + n + i])
            want = copied[len(tokens) :]
            break
    assert lookup(tokens, n, k) == tuple(want)


@pytest.mark.parametrize("sizes", [{"n": 0}, {"k": 0}, {"n": 1.5}])
def test_sizes_are_checked(sizes: dict[str, Any], folder: Path) -> None:
    """A size that is no positive integer is named."""
    (name,) = sizes
    with pytest.raises(InvalidSetting, match=f"{name}.*positive integer"):
        ngram(**sizes)
    if name == "k":
        with pytest.raises(InvalidSetting, match=r"k.*positive integer"):
            draft_model(small(folder), **sizes)


# --- the same tokens --------------------------------------------------------------------------------------------------

PROPOSERS: dict[str, Callable[[Path, Path], Propose]] = {
    "ngram": lambda _folder, _other: ngram(2, 5),
    "wrong": lambda _folder, _other: wrong,
    "same model": lambda folder, _other: draft_model(small(folder), 4),
    "other model": lambda _folder, other: draft_model(small(other), 3),
    "same model, rejection": lambda folder, _other: draft_model(small(folder), 4, rejection=True),
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": "reserve"},
        {"num_blocks": 18},
        {"max_num_batched_tokens": 9},
        {"prefix_cache": False, "block_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PROPOSERS)
def test_tokens_are_those_of_plain_decoding(
    name: str, changes: dict[str, Any], folder: Path, other: Path, wanted: list[tuple[int, ...]]
) -> None:
    """Greedy or sampled, filtered, stopped, short of blocks, in chunks: token for token, and no block is lost."""
    engine = small(folder, **changes)
    settings = {"block_size": engine.machine.limits.block_size}
    propose = PROPOSERS[name](folder, other)
    if settings["block_size"] != 4 and "model" in name:
        propose = draft_model(small(folder if "same" in name else other, **settings, num_blocks=300), 4)
    for _ in range(2):  # the second time over a cache that has the prompts
        found = [result.output_ids for result in generate(engine, PROMPTS, PARAMS, propose=propose)]
        assert found == wanted
        assert violations(engine.world.state) == []
        assert engine.world.state.pool.num_available == engine.machine.limits.num_blocks


def test_a_model_that_agrees_saves_steps(folder: Path) -> None:
    """With the same model for a draft every guess stands: five tokens a step instead of one."""
    plain, fast = Tally(), Tally()
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    (one,) = loop.generate(small(folder, plain), [PROMPTS[0]], params)
    (two,) = generate(small(folder, fast), [PROMPTS[0]], params, propose=draft_model(small(folder), 4))
    assert one.output_ids == two.output_ids
    assert (plain.steps, plain.tokens, plain.drafts) == (41, 41, 0)
    assert (fast.steps, fast.tokens) == (9, 41)
    assert fast.accepted == fast.drafts == 32


def test_the_draft_is_kept_in_step(folder: Path) -> None:
    """Prompts in chunks, prefixes found in the cache, forks and preempted sequences: the same model still agrees."""
    tally = Tally()
    engine = small(folder, tally, max_num_batched_tokens=12, num_blocks=26)
    propose = draft_model(small(folder), 3)
    params = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
    with speculating(engine, propose):
        seqs = [engine.add(Request((*range(20), i), params)) for i in range(4)]
        while not any(len(output.seqs) for output in [engine.step()] if output is not None):
            pass
        engine.fork(seqs[0], (5, 6))
        while engine.unfinished:
            engine.step()
    assert tally.drafts > 60
    assert tally.accepted == tally.drafts


def test_a_prefix_that_the_draft_never_saw(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    """KV that was computed without the draft model makes worse guesses, and the same tokens."""
    engine, plain = small(folder), Tally()
    assert [result.output_ids for result in loop.generate(engine, PROMPTS, PARAMS)] == wanted
    engine.note = plain
    found = generate(engine, PROMPTS, PARAMS, propose=draft_model(small(folder), 4))
    assert [result.output_ids for result in found] == wanted
    assert 0 < plain.accepted < plain.drafts


def test_text_stops_where_it_did(tmp_path: Path) -> None:
    """A stop string within an accepted run cuts the text, the tokens and the reason as without drafts."""
    folder = toys.folder_of(write_tiny(tmp_path, vocab_size=280), toys.byte_level())
    engine = small(folder)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    (whole,) = loop.generate(engine, ["hello hello"], params)
    assert whole.text is not None
    for at in range(3, 20, 3):
        stop = whole.text[at : at + 2]
        (want,) = loop.generate(engine, ["hello hello"], evolve(params, stop=stop))
        (got,) = generate(engine, ["hello hello"], evolve(params, stop=stop), propose=draft_model(small(folder), 5))
        assert got == want
        assert got.finish_reason == "stop"


def test_outputs_end_at_a_stop_string(tmp_path: Path) -> None:
    """In a loop of one's own too: tokens that were right but lie behind the stop are in no output."""
    folder = toys.folder_of(write_tiny(tmp_path, vocab_size=280), toys.byte_level())
    engine = small(folder)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    (whole,) = loop.generate(engine, ["hello hello"], params)
    assert whole.text is not None
    with speculating(engine, draft_model(small(folder), 5)):
        for at in range(3, 20, 3):
            seq = engine.add(Request(whole.prompt_ids, evolve(params, stop=whole.text[at : at + 2])))
            told, ends = list[int](), []
            while engine.unfinished:
                output = engine.step()
                if output is not None:
                    told += [token for s, token in zip(ints(output.seqs), ints(output.tokens), strict=True) if s == seq]
                    ends += output.finished
            assert tuple(told) == ends[0].output
            assert ends[0].reason == "stop"


@pytest.mark.parametrize("rejection", [False, True])
def test_all_that_a_request_can_ask_for_beside(rejection: bool, folder: Path) -> None:
    """Several completions, log-probabilities of prompt and output, in chunks: the whole results are those without."""
    params = [
        SamplingParams(max_tokens=16, temperature=0.9, seed=3, n=3, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.9, seed=4, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.0, logprobs=3, stop_token_ids=tuple(range(0, 90, 4)), n=1),
    ]
    tally = Tally()
    plain, fast = small(folder, max_num_batched_tokens=20), small(folder, tally, max_num_batched_tokens=20)
    propose = draft_model(small(folder), 3, rejection=rejection)
    for _ in range(2):
        want = loop.generate(plain, PROMPTS[:3], params)
        got = generate(fast, PROMPTS[:3], params, propose=propose)
        for one, other in zip(want, got, strict=True):
            assert [x.output_ids for x in one.outputs] == [x.output_ids for x in other.outputs]
            assert [said(x.logprobs) for x in one.outputs] == [pytest.approx(said(x.logprobs)) for x in other.outputs]
            assert said(one.prompt_logprobs) == pytest.approx(said(other.prompt_logprobs))
        assert violations(fast.world.state) == []
    assert tally.accepted == tally.drafts > 80


def said(logprobs: Sequence[Any] | None) -> list[float]:
    """The numbers in *logprobs*."""
    found = [one for one in logprobs or () if one is not None]
    return [x for one in found for x in (one.token_id, one.logprob, one.rank, *one.top_ids, *one.top_logprobs)]


def test_a_stream_that_is_speculated_on_for_a_while(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    """Going over to drafts and back in the middle of a stream, with steps in flight, changes no token."""
    engine = small(folder)
    got: list[int] = []
    for i, delta in enumerate(stream(engine, PROMPTS[0], PARAMS[0])):
        got += delta.token_ids
        if i == 2:
            block = speculating(engine, draft_model(small(folder), 2))
            block.__enter__()
        if i == 5:
            block.__exit__(None, None, None)
    assert tuple(got) == wanted[0]
    assert engine.machine.overlap


def test_a_loop_of_your_own(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    """advance_speculative stands where advance does."""
    engine = small(folder)
    world, ends = engine.world, {}
    world, output = advance_speculative(engine.machine, world, ngram(2, 4), [Arrived(Request(PROMPTS[0], PARAMS[0]))])
    while has_work(world.state) or world.flight is not None:
        world, output = advance_speculative(engine.machine, world, ngram(2, 4))
        ends |= {done.seq: done.output for done in output.finished} if output is not None else {}
    assert ends == {0: wanted[0]}


# --- traces, faults ---------------------------------------------------------------------------------------------------


def test_a_trace_replays(folder: Path, other: Path) -> None:
    """Every event's digest comes again, without any model."""
    events: list[Event] = []
    digests: list[str] = []

    def note(event: Event, state: EngineState) -> None:
        events.append(event)
        digests.append(digest(state))

    engine = small(folder, note, num_blocks=18)
    generate(engine, PROMPTS, PARAMS, propose=draft_model(small(other), 3))
    assert verify(Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))) is None


@pytest.mark.parametrize(
    "changes", [{"block_size": 8}, {"num_blocks": 119}, {"max_num_seqs": 7}, {"max_model_len": 63}], ids=str
)
def test_a_draft_model_that_does_not_fit(changes: dict[str, Any], folder: Path) -> None:
    """A smaller engine, or one with other blocks, is refused by the name of the size; the engine goes on without."""
    engine = small(folder)
    (name,) = changes
    with pytest.raises(InvalidSetting, match=name):
        generate(engine, PROMPTS[:1], PARAMS[:1], propose=draft_model(small(folder, **changes), 2))
    assert live(engine.world.state) == set()
    assert len(loop.generate(engine, PROMPTS[:1], PARAMS[:1])[0].output_ids) == 24


def test_a_draft_model_of_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Its guesses would be about other tokens."""
    with pytest.raises(InvalidSetting, match=r"vocab_size.*of the draft model is 97, not 96"):
        generate(small(folder), [[1]], propose=draft_model(small(write_tiny(tmp_path, vocab_size=97)), 2))


def test_a_draft_model_with_requests_of_its_own(folder: Path) -> None:
    """Its blocks are not its own then."""
    busy = small(folder)
    busy.add(Request((1, 2)))
    with pytest.raises(AgentInferError, match="requests of its own"):
        generate(small(folder), [[1]], propose=draft_model(busy, 2))


@contextmanager
def failing(engine: Engine, error: BaseException, after: int) -> Iterator[None]:
    """The model of *engine* raises *error* in each forward pass after so many."""
    machine, left = engine.machine, iter(range(after))

    def forward(*args: Any) -> Any:
        if next(left, None) is None:
            raise error
        return machine.model.forward(*args)

    engine.machine = evolve(machine, model=evolve(machine.model, forward=forward))
    try:
        yield
    finally:
        engine.machine = machine


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 7])
def test_a_draft_that_raises_undoes_the_step(
    error: BaseException, after: int, folder: Path, wanted: list[tuple[int, ...]]
) -> None:
    """Whoever stepped hears of it, no request fails, and the engine goes on where it was, with the draft model too."""
    engine, drafter = small(folder), small(folder)
    propose = draft_model(drafter, 3)
    seqs = [engine.add(Request(prompt, params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    ends: dict[int, tuple[int, ...]] = {}

    def steps() -> None:
        while engine.unfinished:
            output = engine.step()
            ends.update({done.seq: done.output for done in output.finished} if output is not None else {})

    with speculating(engine, propose):
        with failing(drafter, error, after), pytest.raises((AgentInferError, KeyboardInterrupt)) as caught:
            steps()
        assert isinstance(error, KeyboardInterrupt) or "no memory" in str(caught.value)
        assert violations(engine.world.state) == []
        steps()
    assert [ends[seq] for seq in seqs] == wanted


def test_a_step_with_drafts_that_fails(folder: Path) -> None:
    """Its requests end with the error, and the blocks of their drafts come back."""
    engine = small(folder)
    with failing(engine, RuntimeError("no memory"), 3):
        results = generate(engine, PROMPTS, PARAMS, propose=ngram(1, 4))
    assert {result.finish_reason for result in results} == {"error"}
    assert engine.world.state.pool.num_available == engine.machine.limits.num_blocks
    assert len(generate(engine, PROMPTS[:1], PARAMS[:1], propose=ngram(1, 4))[0].output_ids) == 24


# --- distributions ----------------------------------------------------------------------------------------------------


def single(engine: Engine, prompt: Sequence[int], temperature: float, top_k: int = 0) -> np.ndarray:
    """The exact distribution of the next token."""
    (found,) = score(engine, [[*prompt, 0]], top=engine.machine.limits.vocab_size)
    logits = np.empty(engine.machine.limits.vocab_size, np.float32)
    logits[found.top_ids[-1]] = found.top_logprobs[-1]
    return probabilities(logits, temperature, top_k)


def joint(engine: Engine, prompt: list[int], temperature: float, top_k: int) -> dict[tuple[int, int], float]:
    """The exact probability of each pair of first tokens."""
    first = single(engine, prompt, temperature, top_k)
    return {
        (a, b): float(first[a] * p)
        for a in ints(np.flatnonzero(first))
        for b, p in enumerate(single(engine, [*prompt, a], temperature, top_k))
        if p > 0
    }


def excess(counts: dict[tuple[int, int], int], exact: dict[tuple[int, int], float]) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean; rare pairs count as one."""
    seeds = sum(counts.values())
    rare = {pair for pair, p in exact.items() if p * seeds < 5}
    cells = [(counts[pair], p) for pair, p in exact.items() if pair not in rare]
    if rare:
        cells.append((sum(counts[pair] for pair in rare), sum(exact[pair] for pair in rare)))
    statistic = sum((n - seeds * p) ** 2 / (seeds * p) for n, p in cells)
    assert len(cells) > 8
    return (statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1))


@pytest.mark.parametrize(
    ("top_k", "seeds"),
    [(4, 1500), pytest.param(0, 2500, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("rejection", [True, False])
def test_pairs_of_tokens_are_distributed_as_in_plain_decoding(
    rejection: bool, top_k: int, seeds: int, folder: Path, near: Path
) -> None:
    """Two tokens after a prompt, both guessed by another model at once: chi-square against the model's own chances."""
    prompt, temperature, tally = [9, 8, 7], 0.6, Tally()
    engine = small(folder, tally)
    exact = joint(engine, prompt, temperature, top_k)
    asked = {"max_tokens": 3, "temperature": temperature, "top_k": top_k, "ignore_eos": True}
    params = [SamplingParams(seed=i, **asked) for i in range(seeds)]
    counts = dict.fromkeys(exact, 0)
    propose = draft_model(small(near), 2, rejection=rejection)
    for result in generate(engine, [prompt] * seeds, params, propose=propose):
        counts[result.output_ids[0], result.output_ids[1]] += 1
    assert excess(counts, exact) < 4
    assert 0.1 * tally.drafts < tally.accepted < 0.9 * tally.drafts


def test_rejection_lets_as_many_guesses_stand_as_is_possible(folder: Path, near: Path) -> None:
    """As many stand as the two distributions have in common; judging by equality comes near that."""
    seeds, rates = 800, list[float]()
    params = [SamplingParams(max_tokens=2, temperature=1.0, seed=i, ignore_eos=True) for i in range(seeds)]
    for rejection in (True, False):
        tally = Tally()
        generate(
            small(folder, tally), [[9, 8, 7]] * seeds, params, propose=draft_model(small(near), 1, rejection=rejection)
        )
        assert tally.drafts == seeds
        rates.append(tally.accepted / seeds)
    p, q = (single(small(which), [9, 8, 7], 1.0) for which in (folder, near))
    common = float(np.minimum(p, q).sum())
    noise = 4 * math.sqrt(common * (1 - common) / seeds)
    assert abs(rates[0] - common) < noise
    assert common / (2 - common) - noise < rates[1] < common + noise
