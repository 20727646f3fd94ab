"""Decode steps, prefills and a mix of requests, on an engine that is driven as `generate` drives it.

Clocks are read on the host when a step has landed, which is the one wait of a step: nothing is synchronised that a
real run does not synchronise, and with overlap the time between two landings is the time of one step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from attrs import frozen

from agentinfer.bench.watch import Profile
from agentinfer.errors import AgentInferError, InvalidSetting
from agentinfer.loop import Engine, result_of
from agentinfer.state.ids import SeqId, cdiv
from agentinfer.state.plan import Output
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.sequence import Finished

IDS: Final = 10_001
"""Prompts are of token ids below this, as those of other engines' benchmarks are."""
clock: Final = time.perf_counter


@frozen
class Times:
    """How long each of some equal things took. Milliseconds."""

    median: float
    p10: float
    p90: float
    mean: float
    each: tuple[float, ...]


def times_of(seconds: Sequence[float]) -> Times:
    """*seconds*, at least one, as Times."""
    ms = np.asarray(seconds, np.float64) * 1e3
    p10, median, p90 = (round(float(x), 4) for x in np.percentile(ms, (10, 50, 90)))
    return Times(median, p10, p90, round(float(ms.mean()), 4), tuple(np.round(ms, 4).tolist()))


def random_ids(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """*count* token ids of *draw*."""
    return tuple(draw.randrange(min(IDS, vocab_size)) for _ in range(count))


# --- decode -------------------------------------------------------------------------------------------------------


@frozen
class Decode:
    """Steps of a full batch, each with one new token a sequence."""

    batch_size: int
    prompt_tokens: int
    mean_context: float
    """Tokens that a sequence had in the middle of the measured steps."""
    ms_per_step: float
    """Median over the runs of a run's time over its steps."""
    tokens_per_s: float
    runs_ms: tuple[float, ...]
    """That of each run."""
    steps: Times
    """All steps of all runs."""


def decode(
    engine: Engine,
    batch_size: int,
    prompt_tokens: int,
    *,
    steps: int = 224,
    warmup: int = 32,
    runs: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
    profile: Profile | None = None,
) -> Decode:
    """Time *steps* steps of *batch_size* sequences, *warmup* steps after the last of them began to decode.

    Raises InvalidSetting for a batch that these limits do not let run together, AgentInferError if it then does not.
    """
    limits = engine.machine.limits
    lead = cdiv(batch_size * prompt_tokens, max(1, limits.max_num_batched_tokens - batch_size)) + 8
    more = 0 if profile is None else profile.steps
    tokens = lead + warmup + steps + more
    _check_fits(engine, batch_size, prompt_tokens + tokens)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    draw = random.Random(seed)
    each: list[float] = []
    totals: list[float] = []
    context = 0.0
    for run in range(runs):
        prompts = [random_ids(draw, prompt_tokens, limits.vocab_size) for _ in range(batch_size)]
        with _running(engine, [Request(ids, params) for ids in prompts]):
            before = _until_steady(engine, batch_size, warmup, tokens)
            marks = [clock()]
            for _ in range(steps):
                _full_step(engine, batch_size)
                marks.append(clock())
            context = prompt_tokens + before / batch_size + steps / 2
            if profile is not None and run == runs - 1:
                profile(lambda: _full_step(engine, batch_size))
        each += np.diff(marks).tolist()
        totals.append((marks[-1] - marks[0]) / steps * 1e3)
    ms = float(np.median(totals))
    rounded = tuple(round(x, 4) for x in totals)
    return Decode(
        batch_size, prompt_tokens, context, round(ms, 4), round(batch_size * 1e3 / ms, 2), rounded, times_of(each)
    )


def _check_fits(engine: Engine, batch_size: int, length: int) -> None:
    limits = engine.machine.limits
    for name, most, need in (
        ("max_num_seqs", limits.max_num_seqs, batch_size),
        ("max_num_batched_tokens", limits.max_num_batched_tokens, batch_size),
        ("max_model_len", limits.max_model_len, length),
        ("num_blocks", limits.num_blocks, batch_size * cdiv(length, limits.block_size)),
    ):
        if most < need:
            raise InvalidSetting(name, f"is {most}; {batch_size} sequences of {length} tokens need {need}")


@contextmanager
def _running(engine: Engine, requests: Sequence[Request]) -> Generator[tuple[SeqId, ...]]:
    """*requests*, added; whatever is left of them is aborted at the end, and nothing is in flight any more."""
    seqs = tuple(engine.add(request) for request in requests)
    try:
        yield seqs
    finally:
        for seq in seqs:
            engine.abort(seq, "measured")
        while engine.unfinished:
            engine.step()


def _until_steady(engine: Engine, batch_size: int, warmup: int, most: int) -> int:
    """Step until all sequences have decoded *warmup* steps together; the tokens that all of them have sampled."""
    together = tokens = 0
    for _ in range(2 * most + 64):
        output = _checked(engine.step())
        sampled = 0 if output is None else len(output.seqs)
        together = together + 1 if sampled == batch_size else 0
        tokens += sampled
        if together > warmup:
            return tokens
    raise AgentInferError(f"{batch_size} sequences never ran together: are there blocks for all of them?")


def _full_step(engine: Engine, batch_size: int) -> None:
    output = _checked(engine.step())
    sampled = 0 if output is None else len(output.seqs)
    if sampled != batch_size:
        raise AgentInferError(f"a step sampled {sampled} tokens instead of {batch_size}: was a sequence preempted?")


def _checked(output: Output | None) -> Output | None:
    """*output*, if nothing has failed in it."""
    for done in output.finished if output is not None else ():
        _check(done)
    return output


def _check(done: Finished) -> Finished:
    if done.reason not in ("length", "stop", "abort"):
        raise AgentInferError(f"a request ended with {done.reason}: {done.detail}")
    return done


# --- prefill ------------------------------------------------------------------------------------------------------


@frozen
class Prefill:
    """One request alone, from its arrival to its first token."""

    prompt_tokens: int
    tokens_per_s: float
    times: Times


def prefill(
    engine: Engine, prompt_tokens: int, *, runs: int = 5, seed: int = 0, profile: Profile | None = None
) -> Prefill:
    """Time the prefill of *prompt_tokens* random ids, one request at a time, after one to warm up.

    Raises InvalidSetting if the prompt is too long.
    """
    _check_fits(engine, 1, prompt_tokens + 1)
    draw = random.Random(seed)
    took = [_first_token(engine, draw, prompt_tokens) for _ in range(runs + 1)][1:]
    if profile is not None:
        profile(lambda: _first_token(engine, draw, prompt_tokens), 1)
    times = times_of(took)
    return Prefill(prompt_tokens, round(prompt_tokens * 1e3 / times.median, 2), times)


def _first_token(engine: Engine, draw: random.Random, prompt_tokens: int) -> float:
    """Seconds from the arrival of a request of one token to its end."""
    ids = random_ids(draw, prompt_tokens, engine.machine.limits.vocab_size)
    begin = clock()
    with _running(engine, [Request(ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))]):
        while True:
            output = _checked(engine.step())
            if output is not None and output.finished:
                return clock() - begin


# --- a mix of requests --------------------------------------------------------------------------------------------


@frozen
class Mix:
    """Requests of many lengths that all arrive at once."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    """Shortest and longest."""
    output_tokens: tuple[int, int]
    temperature: float = 0.0
    seed: int = 0


@frozen
class Throughput:
    """One run of a Mix. Texts are decoded as requests end, where there is a tokenizer."""

    total_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    """Output tokens over the whole time."""
    num_steps: int
    ms_per_step: float
    steps: Times
    first_token: Times
    """From the arrival of all to each request's first token."""


def requests_of(mix: Mix, vocab_size: int, run: int = 0) -> list[Request]:
    """The requests of *mix*. Those of another *run* have the same lengths and other ids: no prefix is found again."""
    draw = random.Random(mix.seed)
    few, most = min(IDS, vocab_size), min(6 * IDS, vocab_size)
    prompts = [[draw.randrange(few) for _ in range(draw.randint(*mix.prompt_tokens))] for _ in range(mix.num_requests)]
    return [
        Request(
            tuple((x + run * IDS) % most for x in ids) if run else tuple(ids),
            SamplingParams(
                max_tokens=draw.randint(*mix.output_tokens), temperature=mix.temperature, ignore_eos=True, seed=i
            ),
        )
        for i, ids in enumerate(prompts)
    ]


def throughput(engine: Engine, mix: Mix, *, runs: int = 1, profile: Profile | None = None) -> list[Throughput]:
    """Serve *mix* *runs* times. Raises InvalidSetting if one request is too long, AgentInferError if one fails."""
    limits = engine.machine.limits
    _check_fits(engine, 1, mix.prompt_tokens[1] + mix.output_tokens[1])
    found = [_serve(engine, requests_of(mix, limits.vocab_size, run)) for run in range(runs)]
    if profile is not None:
        with _running(engine, requests_of(mix, limits.vocab_size, runs)):
            for _ in range(8):
                engine.step()
            profile(lambda: _checked(engine.step()))
    return found


def _serve(engine: Engine, requests: Sequence[Request]) -> Throughput:
    count = len(requests)
    first = np.full(count, np.nan)
    left, tokens = count, 0
    begin = clock()
    with _running(engine, requests) as seqs:
        marks = [clock()]
        while left:
            output = _checked(engine.step())
            marks.append(clock())
            if output is None:
                continue
            places = output.seqs - seqs[0]
            first[places[np.isnan(first[places])]] = marks[-1] - begin
            tokens += len(places)
            for done in output.finished:
                result_of(engine.text, [done], done.seq - seqs[0])
                left -= 1
        total = clock() - begin
    steps = len(marks) - 1
    return Throughput(
        total_s=round(total, 4),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=tokens,
        tokens_per_s=round(tokens / total, 2),
        num_steps=steps,
        ms_per_step=round((marks[-1] - marks[0]) * 1e3 / steps, 4),
        steps=times_of(np.diff(marks).tolist()),
        first_token=times_of(first.tolist()),
    )
