"""Speculative decoding: guess the next tokens cheaply, verify them in one step. A composition of the engine's steps.

`speculate` and `accept` of the control plane, and `launch` and `land`, do all the work; here is who guesses, and how a
guess is judged. Two ways to judge, both exact:

* by equality, unless told otherwise: the token is sampled as ever, and the guess is right if it is that token. So every
  request gets token for token what it gets without guesses, at any temperature. The draft model draws its guesses with
  the same noise (same seed, same output index), which makes them equal most of the time where the models agree.
* by rejection sampling (ops/reject.py): equal in distribution only, but the guess stands as often as is possible.

Knows engines, states, plans and logits. R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from agentinfer import loop
from agentinfer.errors import AgentInferError, InvalidSetting
from agentinfer.loop import Engine
from agentinfer.ops.kv import renew
from agentinfer.ops.reject import F64, reject
from agentinfer.ops.sample import GREEDY_BELOW, probabilities, subset
from agentinfer.result import Note, Prompt, Result, silent
from agentinfer.state.engine import EngineState, tokens_of
from agentinfer.state.event import Event, Failed, Landed, Stepped
from agentinfer.state.ids import I32, ints, seal
from agentinfer.state.plan import Output, Plan, Sampled, SamplingColumns, sampled
from agentinfer.state.request import SamplingParams
from agentinfer.state.schedule import rebase, schedule
from agentinfer.state.speculate import Guess, guesses, room, runs_of, speculate
from agentinfer.steps import Flight, Machine, land, launch
from agentinfer.turn import World, advance

NO_CHANCES: Mapping[int, F64] = MappingProxyType({})


@frozen(eq=False)
class Drafted:
    """A plan with drafts, and the state that it is under way in."""

    state: EngineState
    plan: Plan
    chances: Mapping[int, F64] = NO_CHANCES
    """Sample -> the distribution [V] that the draft there was drawn from, to be judged by rejection sampling. Samples
    that it lacks are judged by equality."""


Propose = Callable[[EngineState, Plan], Drafted]
"""(state, plan), as `schedule` gives them -> the same with drafts. Called for every plan, once all before have landed.
What it raises ends the step, as with a policy."""


def lookup(tokens: Sequence[int], n: int, k: int) -> tuple[int, ...]:
    """The *k* tokens that followed when the last *n* of *tokens* last occurred; () if they never did.

    Where what followed reaches the end, it goes on with itself: a repetition is continued for ever.
    **Source**: Saxena 2023, "Prompt lookup decoding"; the overlap is that of Ziv and Lempel 1977.
    """
    ids, size = np.array(tokens, np.int64), len(tokens)
    if size <= n:
        return ()
    same = np.ones(size - n, np.bool_)
    for i in range(n):
        same &= ids[i : size - n + i] == ids[size - n + i]
    found = np.flatnonzero(same)
    if not len(found):
        return ()
    after = int(found[-1]) + n
    return tuple(ints(ids[after + np.arange(k) % (size - after)]))


def ngram(n: int = 3, k: int = 5) -> Propose:
    """Guess *k* tokens by `lookup` of the last *n*, in prompt and output."""
    for name, value in (("n", n), ("k", k)):
        _positive(name, value)

    def propose(state: EngineState, plan: Plan) -> Drafted:
        drafts = {seq: lookup(tokens_of(state, seq), n, min(k, most)) for seq, most in room(state, plan).items()}
        return Drafted(*speculate(state, plan, drafts))

    return propose


def draft_model(drafter: Engine, k: int = 4, *, rejection: bool = False) -> Propose:
    """Guess *k* tokens with the model of *drafter*, an engine that has nothing else to do.

    Its KV is kept in step with the other's: it runs every plan, in blocks of the same numbers, and then *k* steps of
    its own. So it must have as many blocks, rows and positions, which is checked: InvalidSetting. Blocks that were
    filled before it was there hold nothing for it, and its guesses after them will be worse.
    *rejection*: judge by rejection sampling; logits of both models then go to the host.
    """
    _positive("k", k)
    if drafter.machine.ranks.tp.size > 1:
        raise InvalidSetting("drafter", "must be an engine of one rank")

    def propose(state: EngineState, plan: Plan) -> Drafted:
        _check_fit(drafter, state)
        wide_state, wide = speculate(state, plan, dict.fromkeys(room(state, plan), (0,) * k))
        tokens, chances = _draft(drafter, wide_state, plan, wide, watch=rejection)
        inputs = wide.inputs.copy()
        for guess, line in zip(guesses(wide), tokens, strict=True):
            inputs[guess.first : guess.first + guess.width] = line
        seal(inputs)
        wide = evolve(wide, inputs=inputs)
        return Drafted(evolve(wide_state, last=wide), wide, chances)

    return propose


def _positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidSetting(name, f"must be a positive integer, not {value!r}")


def _check_fit(drafter: Engine, state: EngineState) -> None:
    """Raises InvalidSetting unless *drafter* can run the plans of *state*, and AgentInferError if it has other work."""
    own, wanted = drafter.machine.limits, state.limits
    for name in ("vocab_size", "block_size"):
        if getattr(own, name) != getattr(wanted, name):
            raise InvalidSetting(name, f"of the draft model is {getattr(own, name)}, not {getattr(wanted, name)}")
    for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(own, name) < getattr(wanted, name):
            raise InvalidSetting(name, f"of the draft model is {getattr(own, name)}, less than {getattr(wanted, name)}")
    if drafter.unfinished:
        raise AgentInferError("the engine of the draft model has requests of its own")


def _draft(
    drafter: Engine, state: EngineState, plan: Plan, wide: Plan, *, watch: bool
) -> tuple[list[list[int]], dict[int, F64]]:
    """Tokens for each of the `guesses` of *wide*, which is *plan* with room for them, and by sample of *wide* the
    distributions that they were drawn from, if *watch*.
    """
    device, seen = drafter.world.device, list[Tensor]()
    machine = _watching(drafter.machine, seen) if watch else drafter.machine
    places, flights, logits = guesses(wide), list[Flight | Failed](), list[Tensor]()
    first = rebase(state, evolve(plan, tables=wide.tables), device.kv.step)
    first = evolve(first, edits=(), told=(), logprobs=None, scored=None)
    try:
        for j in range(1 + max((guess.width for guess in places), default=0)):
            flight, device = launch(machine, device, _pass(wide, places, j) if j else first)
            flights.append(flight)
            if isinstance(flight, Failed):
                break
            logits += seen[:1]
            seen.clear()
    except BaseException:
        device = evolve(device, kv=renew(device.kv, "a draft that was interrupted"))
        raise
    finally:
        drafter.world = World(drafter.world.state, device, None)
    return _collected(wide, places, flights, logits)


def _pass(wide: Plan, places: Sequence[Guess], j: int) -> Plan:
    """The step that computes draft j - 1 of each row that has so many, and samples draft j. The last of them computes
    what nobody asked for: when all drafts are right, the next plan begins after it.
    """
    mine = [guess for guess in places if guess.width >= j]
    flat = np.array([guess.first + j - 1 for guess in mine], np.int64)
    at = np.array([guess.row for guess in mine], np.int64)
    context = wide.context[at] - np.array([guess.width - j for guess in mine], np.int32)
    each, one = np.arange(len(mine), dtype=np.int32), np.ones(len(mine), np.int32)
    return Plan(
        step=wide.step,
        base=wide.step,
        rows=wide.rows[at],
        seqs=wide.seqs[at],
        start=context - 1,
        count=one,
        context=context,
        slots=wide.slots[flat],
        inputs=-one,
        samples=each,
        sample_rows=each,
        sampling=subset(wide.sampling, np.array([guess.sample + j for guess in mine], np.int64)),
        tables=(),
        copies=(),
        preempted=(),
    )


def _collected(
    wide: Plan, places: Sequence[Guess], flights: Sequence[Flight | Failed], logits: Sequence[Tensor]
) -> tuple[list[list[int]], dict[int, F64]]:
    """What the passes sampled, a list for each of *places*; and the distributions, if there are *logits* of them.

    Raises AgentInferError if a pass failed.
    """
    tokens: list[list[int]] = [[] for _ in places]
    chances: dict[int, F64] = {}
    banned = {sample for sample, _ in wide.sampling.banned}
    for j, flight in enumerate(flights):
        row_of, result = _landed(flight)
        for i, guess in enumerate(places):
            if j >= guess.width:
                continue
            at, sample = row_of.index(int(wide.rows[guess.row])), guess.sample + j
            tokens[i].append(int(result.tokens[at]))
            if logits and bool(result.ok[at]) and sample not in banned:
                found = _distribution(logits[j][at], wide.sampling, sample)
                chances |= {} if found is None else {sample: found}
    return tokens, chances


def _landed(flight: Flight | Failed) -> tuple[list[int], Sampled]:
    """The row of each sample of *flight*, and what it chose. Raises AgentInferError if it failed."""
    result = flight if isinstance(flight, Failed) else land(flight)
    if isinstance(flight, Failed) or isinstance(result, Failed):
        raise AgentInferError(f"the draft model: {result}")
    return ints(flight.plan.rows[flight.plan.sample_rows]), result


def _watching(m: Machine, seen: list[Tensor]) -> Machine:
    """*m*, eager, which puts the logits that it samples from in *seen*."""

    def sample(logits_SV: Tensor, s: SamplingColumns) -> tuple[Tensor, Tensor]:
        seen.append(logits_SV)
        return m.ops.sample(logits_SV, s)

    return evolve(m, ops=evolve(m.ops, sample=sample), replay=None)


def _distribution(logits_V: Tensor, s: SamplingColumns, i: int) -> F64 | None:
    """What sample *i* is drawn from. None: it is greedy."""
    temperature = float(s.temperature[i])
    if temperature < GREEDY_BELOW:
        return None
    row = logits_V.to(torch.float32).cpu().numpy()
    return probabilities(row, temperature, int(s.top_k[i]), float(s.top_p[i]), float(s.min_p[i]))


def rejecting(m: Machine, plan: Plan, chances: Mapping[int, F64]) -> Machine:
    """*m* for this one *plan*: drafts of *chances* are judged by rejection sampling."""
    drafts = {
        guess.sample + j: int(plan.inputs[guess.first + j]) for guess in guesses(plan) for j in range(guess.width)
    }

    def sample(logits_SV: Tensor, s: SamplingColumns) -> tuple[Tensor, Tensor]:
        tokens, ok = m.ops.sample(logits_SV, s)
        if len(tokens) < len(plan.samples):  # those with edits or bans, by themselves
            return tokens, ok
        fine = cast("list[bool]", ok.tolist())
        for i, q_V in chances.items():
            p_V = _distribution(logits_SV[i], s, i) if fine[i] else None
            if p_V is not None:
                tokens[i] = reject(p_V, q_V, drafts[i], int(s.seed[i]), int(s.index[i]))
        return tokens, ok

    return evolve(m, ops=evolve(m.ops, sample=sample), replay=None)


def with_drafts(propose: Propose, m: Machine, state: EngineState) -> tuple[Machine, EngineState, Plan | None]:
    """A Planner for `advance`: the next step by the machine's policy, with the drafts of *propose*."""
    state, plan = schedule(state, m.policy)
    if plan is None:
        return m, state, None
    drafted = propose(state, plan)
    runner = rejecting(m, drafted.plan, drafted.chances) if drafted.chances else m
    return runner, drafted.state, drafted.plan


def advance_speculative(
    m: Machine, world: World, propose: Propose, events: Iterable[Event] = (), note: Note = silent
) -> tuple[World, Output | None]:
    """`advance` with drafts. A step lands before the next is planned: what follows drafts, nobody can know before."""
    return advance(evolve(m, overlap=False), world, events, note, partial(with_drafts, propose))


@contextmanager
def speculating(engine: Engine, propose: Propose) -> Generator[Engine]:
    """Let *engine* step with the drafts of *propose* for the time of a block, whoever steps it."""
    machine, planner = engine.machine, engine.planner
    engine.machine, engine.planner = evolve(machine, overlap=False), partial(with_drafts, propose)
    try:
        yield engine
    finally:
        engine.machine, engine.planner = machine, planner


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    propose: Propose,
    progress: bool | None = None,
) -> list[Result]:
    """`loop.generate` with the drafts of *propose*: the same results in fewer steps."""
    with speculating(engine, propose):
        return loop.generate(engine, prompts, params, progress=progress)


@define(eq=False)
class Tally:
    """A Note that counts. Mutable. Give it to an engine as `note`."""

    steps: int = 0
    tokens: int = 0
    """Sampled by rows, those of rejected drafts not counted."""
    drafts: int = 0
    accepted: int = 0
    flying: dict[int, Plan] = field(factory=dict[int, Plan])

    def __call__(self, event: Event, state: EngineState) -> None:
        """Count *event*, which led to *state*."""
        match event:
            case Stepped() if state.last is not None:
                self.steps += 1
                self.flying[state.last.step] = state.last
            case Landed(step, tokens, bad) if step in self.flying:
                plan, ok = self.flying.pop(step), np.ones(len(tokens), np.bool_)
                ok[list(bad)] = False
                runs: I32 = runs_of(plan, sampled(plan, tokens, ok))
                self.drafts += sum(plan.drafts)
                self.accepted += int(runs.sum()) - len(runs)
                self.tokens += int(runs[np.unique(plan.sample_rows)].sum())
            case Failed(step):
                self.flying.pop(step, None)
            case _:
                pass
