"""advance: one turn of the engine, from a world to the next. Plans, launches, lands; the control plane decides.

Knows the state and the device. Must not know clients, text or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from attrs import evolve, frozen

from agentinfer.ops.kv import Donated, renew
from agentinfer.result import Note, silent
from agentinfer.state.commit import flush
from agentinfer.state.engine import EngineState, find_running, tokens_of
from agentinfer.state.event import Event, Failed, Landed, Raised, Stepped
from agentinfer.state.history import fold
from agentinfer.state.ids import SeqId, ints
from agentinfer.state.plan import Output, Plan
from agentinfer.state.schedule import rebase, schedule
from agentinfer.state.speculate import accept, drafts_of
from agentinfer.steps import Device, Flight, Machine, finish, land, launch


@frozen(eq=False)
class World:
    """All that changes: the control plane's state, the device's memory, and the step in flight."""

    state: EngineState
    device: Device
    flight: Flight | None


Planner = Callable[[Machine, EngineState], tuple[Machine, EngineState, Plan | None]]
"""Plans a step: the machine to run it, and what `schedule` gives."""


def planned(m: Machine, state: EngineState) -> tuple[Machine, EngineState, Plan | None]:
    """The next step by the machine's policy, on that machine."""
    return m, *schedule(state, m.policy)


def advance(
    m: Machine, world: World, events: Iterable[Event] = (), note: Note = silent, planner: Planner = planned
) -> tuple[World, Output | None]:
    """One turn of the engine: hear *events*, plan and launch a step, land the one before it.

    The output is of the step that landed, and of whatever else ended; None: nothing did. Without overlap the
    step before lands first. Never raises for what a step does: its requests end with the error.
    """
    state, flight, output = world.state, world.flight, None
    for event in events:
        state = fold(state, (event,))
        note(event, state)
    if flight is not None and not m.overlap:
        state, output = settle(state, flight, note)
        flight = None
    runner, state, plan = planner(m, state)
    launched, device = None, world.device
    if plan is not None:
        note(Stepped(drafts_of(plan)), state)
        launched, device = launch(runner, device, rebase(state, plan, device.kv.step))
        if isinstance(launched, Failed):
            state = fold(state, (launched,))
            note(launched, state)
            launched = None
    if flight is not None:
        state, output = settle(state, flight, note)
    if launched is not None and launched.late is not None:  # all tokens before its samples are known now
        state, launched, device = _finish(m, state, launched, device, note)
    if output is None:
        state, output = flush(state)
    return World(state, device, launched), output


def _finish(
    m: Machine, state: EngineState, flight: Flight, device: Donated[Device], note: Note
) -> tuple[EngineState, Flight | None, Device]:
    """Have the host see to the logits that wait for it; what that raised ends its sequence. *Donates* device."""
    finished, device, broken = finish(m, device, flight, partial(_tokens_if_live, state))
    events: list[Event] = [Raised(seq, reason) for seq, reason in broken]
    if isinstance(finished, Failed):
        events.append(finished)
        finished = None
    for event in events:
        state = fold(state, (event,))
        note(event, state)
    return state, finished, device


def _tokens_if_live(state: EngineState, seq: SeqId) -> tuple[int, ...] | None:
    return None if find_running(state, seq) is None else tokens_of(state, seq)


def settle(state: EngineState, flight: Flight, note: Note = silent) -> tuple[EngineState, Output | None]:
    """*state* after *flight* has landed, or failed to."""
    result = land(flight)
    if isinstance(result, Failed):
        state, output = fold(state, (result,)), None
        note(result, state)
        return state, output
    bad = tuple(i for i, ok in enumerate(result.ok.tolist()) if not ok)
    state, output = accept(state, flight.plan, result)
    note(Landed(flight.plan.step, tuple(ints(result.tokens)), bad), state)
    return state, output


def landed(world: World, note: Note = silent) -> tuple[World, Output | None]:
    """*world* after what was in flight has landed."""
    if world.flight is None:
        return world, None
    state, output = settle(world.state, world.flight, note)
    return World(state, world.device, None), output


def recovered(world: World, note: Note = silent) -> tuple[World, Output | None]:
    """*world*, whose device was given to a step that never came back, after what was in flight has landed."""
    world, output = landed(world, note)
    kv = renew(world.device.kv, "a step that was interrupted")
    return World(world.state, evolve(world.device, kv=kv), None), output
