"""What a state that is a value makes possible: one fold over events, replay, rewind, forecast. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from attrs import evolve, frozen

from agentinfer.state.admit import abort, arrive, fail, fork, release, stop
from agentinfer.state.commit import commit
from agentinfer.state.engine import EngineState, find_running, find_waiting, initial, known_tokens
from agentinfer.state.event import Aborted, Arrived, Event, Failed, Forked, Landed, Raised, Stepped, Stopped, Swapped
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.limits import Limits
from agentinfer.state.log import Queue
from agentinfer.state.plan import Output, Plan, sampled
from agentinfer.state.policy import Policy, throughput
from agentinfer.state.schedule import schedule
from agentinfer.state.sequence import Finished, Waiting, again
from agentinfer.state.speculate import accept, speculate
from agentinfer.state.swap import sampled_by, swap


@frozen(eq=False)
class Moment:
    """An engine at one point of its history: the state, the plans that have not landed, and the last output."""

    state: EngineState
    flights: tuple[Plan, ...] = ()
    output: Output | None = None


def fold(state: EngineState, events: Iterable[Event]) -> EngineState:
    """*state* after what clients and the device reported. Stepped and Landed need a Moment: see `step`.

    Total: an event about a sequence that has left changes nothing.
    """
    for event in events:
        match event:
            case Arrived(request):
                state, _ = arrive(state, request)
            case Aborted(seq, reason):
                state = abort(state, seq, reason)
            case Stopped(seq, count, text):
                state = stop(state, seq, count, text)
            case Forked(seq, seeds):
                if find_running(state, seq) is not None or find_waiting(state, seq) is not None:
                    state, _ = fork(state, seq, len(seeds), seeds)
            case Swapped(recompute):
                state = swap(state, recompute=recompute)
            case Failed(_, seqs, reason):
                state = fail(state, seqs, reason)
            case Raised(seq, reason):
                state = fail(state, (seq,), reason)
            case _:
                raise TypeError(f"{event!r} is no event of a state alone")
    return state


def step(moment: Moment, event: Event, policy: Policy = throughput) -> Moment:
    """The whole control plane as one fold. Raises ValueError for a Landed or Failed step that is not in flight."""
    if isinstance(event, Stepped):
        state, plan = schedule(moment.state, policy)
        if plan is not None:
            state, plan = speculate(state, plan, dict(event.drafts))
        return Moment(state, moment.flights if plan is None else (*moment.flights, plan))
    if isinstance(event, Landed | Failed):
        left = tuple(plan for plan in moment.flights if plan.step != event.step)
        if len(left) == len(moment.flights):
            raise ValueError(f"step {event.step} is not in flight")
        if isinstance(event, Failed):
            return Moment(fail(moment.state, event.seqs, event.reason), left)
        plan = next(plan for plan in moment.flights if plan.step == event.step)
        ok = np.ones(len(event.tokens), np.bool_)
        ok[list(event.bad)] = False
        state, output = accept(moment.state, plan, sampled(plan, event.tokens, ok))
        return Moment(state, left, output)
    return Moment(fold(moment.state, (event,)), moment.flights)


def replay(limits: Limits, events: Iterable[Event], policy: Policy = throughput) -> Iterator[Moment]:
    """Every moment that the engine went through, the first one included. Needs no model."""
    moment = Moment(initial(limits))
    yield moment
    for event in events:
        moment = step(moment, event, policy)
        yield moment


def rewind(old: EngineState, now: EngineState) -> EngineState:
    """Go on from *old*, an earlier state of the engine that is at *now*.

    KV is a cache of tokens: the sequences of *old* wait again with the tokens they had, and find what the
    prefix cache of *now* still holds; at worst something is recomputed. Steps in flight land into nothing.
    """
    back = [
        again(run, known_tokens(run, int(old.cols.known[run.row]), old.cols.tail), int(old.cols.cached[run.row]))
        for run in old.rows
        if run is not None
    ]
    cleared = release(now, [run for run in now.rows if run is not None])
    requeued, waiting = tuple(sorted([*back, *old.requeued], key=lambda w: w.seq)), old.waiting
    if now.version != old.version:
        requeued = tuple(sampled_by(requeued, now.version))
        waiting = Queue[Waiting].of(sampled_by(waiting, now.version))
    return evolve(cleared, waiting=waiting, requeued=requeued, ended=())


@frozen
class Forecast:
    """When each sequence would get its first token and its last, if nothing else arrived."""

    first_token_s: Mapping[SeqId, float]
    finish_s: Mapping[SeqId, float]
    preemptions: int


def forecast(
    state: EngineState, cost_s: Callable[[Plan], float], policy: Policy = throughput, max_steps: int = 100_000
) -> Forecast:
    """Run the real scheduler ahead of *state*, with *cost_s* seconds a plan and every sequence going to its limit."""
    now, preemptions = 0.0, 0
    first: dict[SeqId, float] = {}
    finish: dict[SeqId, float] = {}
    for _ in range(max_steps):
        state, plan = schedule(state, policy)
        if plan is None:
            break
        now += cost_s(plan)
        preemptions += len(plan.preempted)
        state, output = commit(state, plan, sampled(plan, np.full(len(plan.samples), -2)))
        for seq in ints(output.seqs):
            first.setdefault(SeqId(seq), now)
        finish.update((ended.seq, now) for ended in output.finished)
    return Forecast(first, finish, preemptions)


def diff(old: EngineState, new: EngineState) -> list[str]:
    """What changed from *old* to *new*, a line a fact."""
    lines = [
        f"{name}: {getattr(old, name)} -> {getattr(new, name)}"
        for name in ("step", "next_seq")
        if getattr(old, name) != getattr(new, name)
    ]
    before, after = _places(old), _places(new)
    for seq in sorted(before.keys() | after.keys()):
        was, now = before.get(seq, "absent"), after.get(seq, "gone")
        if was != now:
            lines.append(f"sequence {seq}: {was} -> {now}")
    counts = [(len(s.pool.free), len(s.pool.cached), int((s.pool.refs > 0).sum())) for s in (old, new)]
    if counts[0] != counts[1]:
        lines.append("blocks free/cached/referenced: {}/{}/{} -> {}/{}/{}".format(*counts[0], *counts[1]))
    return lines


def _places(state: EngineState) -> dict[SeqId, str]:
    places = {w.seq: f"waiting with {len(w.tokens)} tokens" for w in (*state.requeued, *state.waiting)}
    for run in state.rows:
        if run is not None:
            computed, length = state.cols.computed[run.row], state.cols.length[run.row]
            places[run.seq] = f"row {run.row}, {computed} of {length} computed, {len(run.blocks)} blocks"
    return places


def explain(moments: Iterable[Moment], seq: SeqId) -> list[str]:
    """What happened to *seq*, step by step: where it was, and what it waited for."""
    lines: list[str] = []
    for moment in moments:
        state = moment.state
        place = _places(state).get(seq)
        waiting = find_waiting(state, seq)
        if waiting is not None:
            ahead = [w.seq for w in (*state.requeued, *state.waiting) if w.seq != seq]
            rows = state.limits.max_num_seqs - len(state.order)
            place = f"{place}; {rows} rows and {state.pool.num_available} blocks to be had, beside it wait {ahead}"
        if place is not None and (not lines or not lines[-1].endswith(place)):
            lines.append(f"step {state.step}: {place}")
    return lines


def ended(moments: Iterable[Moment]) -> dict[SeqId, Finished]:
    """Every sequence that ended in *moments*, with how it ended."""
    found: dict[SeqId, Finished] = {}
    for moment in moments:
        done = (*moment.state.ended, *(moment.output.finished if moment.output is not None else ()))
        found.update((one.seq, one) for one in done)
    return found
