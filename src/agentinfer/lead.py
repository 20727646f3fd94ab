"""One state on several ranks: rank 0 tells what it hears and does, the others do the same and compare.

The control plane is replicated: rank 0 alone takes requests, and tells the others each event. They fold the same
events, plan the same steps and compute their part of them; a plan that is not rank 0's own is an error that names rank
and step. Sampled tokens never travel here: rank 0's are broadcast by the step itself (steps.py). Knows nothing of
processes: `tell` and `turns` are whatever carries JSON.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from attrs import define, field

from agentinfer.errors import AgentInferError, CheckpointError
from agentinfer.loop import settle
from agentinfer.ops.comm import Pulse, RankLost
from agentinfer.scoring import score_along
from agentinfer.state.commit import flush
from agentinfer.state.engine import EngineState, digest, initial
from agentinfer.state.event import Event, Failed, Landed, Stepped
from agentinfer.state.history import fold
from agentinfer.state.plan import plan_digest
from agentinfer.state.schedule import rebase, schedule
from agentinfer.state.speculate import speculate
from agentinfer.state.trace import decode_event, encode_event
from agentinfer.steps import Device, Flight, Machine, finish, launch
from agentinfer.swap import Source, take_over

Turn = Mapping[str, Any]
"""What rank 0 tells once a step: {"events": [..]}, the last of which is the step; {"score": sequences of tokens};
{"weights": a folder, or null: each rank's own}; or {"end": digest of its state, "events": [..]}.
"""

LOAD_S = 1800.0
"""Seconds that a rank may keep others waiting while it reads weights."""


class Diverged(AgentInferError, RuntimeError):
    """A rank came to another plan, or to other tokens, than rank 0."""


@define(eq=False)
class Lead:
    """What rank 0 notes for the others. Mutable: events wait here for the step that they come before."""

    tell: Callable[[Turn], None]
    pulse: Pulse
    waiting: list[dict[str, Any]] = field(factory=list[dict[str, Any]])
    step: int = -1
    begun: str = ""
    """What the others do beside this rank."""

    def __call__(self, event: Event, state: EngineState) -> None:
        """A Note for Engine.lead. Raises RankLost, and AgentInferError for a step that can not be told any more."""
        match event:
            case Stepped(drafts):
                self._check()
                plan = state.last
                if plan is None or plan.step <= self.step:
                    raise AgentInferError(f"step {self.step} was interrupted, but other ranks have begun it")
                self.step = self.pulse.step = plan.step
                step = {"event": "Stepped", "plan": plan_digest(plan), "drafts": drafts}
                turn = {"events": [*self.waiting, step]}
                self.waiting.clear()
                self.tell(turn)
            case Landed(step, tokens, bad):
                self.waiting.append({"event": "Landed", "step": step, "tokens": _checksum(tokens, bad)})
            case Failed(step, _, reason):
                raise RankLost(f"rank 0 failed in step {step}: {reason}")
            case _:
                self.waiting.append(encode_event(event))

    @contextmanager
    def beside(self, turn: Turn) -> Generator[None]:
        """For Engine.others: the others do *turn* beside this rank's block. One that raises leaves them behind: nothing
        can be told any more. Raises RankLost, and AgentInferError for that.
        """
        self._check()
        self.begun = ", ".join(turn)
        self.tell(turn)
        with _patient(self.pulse, turn):
            yield
        self.begun = ""

    def _check(self) -> None:
        if self.begun:
            raise AgentInferError(f"{self.begun}: it was interrupted, but other ranks have begun it")


@contextmanager
def _patient(pulse: Pulse, turn: Turn) -> Generator[None]:
    """Whoever has read its weights waits for the others longer than in a step."""
    before = pulse.deadline_s
    pulse.deadline_s = max(before, LOAD_S) if "weights" in turn else before
    try:
        yield
    finally:
        pulse.deadline_s = before


def _checksum(tokens: Iterable[int], bad: Iterable[int]) -> int:
    return zlib.crc32(repr((tuple(tokens), tuple(bad))).encode())


def follow(
    m: Machine, device: Device, turns: Iterable[Turn], pulse: Pulse, weights: Callable[[], Source] | None = None
) -> EngineState:
    """Do what rank 0 does, as its *turns* say, until it ends; the state that all have come to. *weights*: gives those
    of this rank when rank 0 swaps its own.

    Raises Diverged, and whatever a step raises: no rank goes on alone.
    """
    state, flights = initial(m.limits), deque[Flight]()
    for turn in turns:
        if "end" in turn:
            state = _landed(m, state, flights, turn["events"])
            _agree(m, state.step, "state", digest(state), turn["end"])
            return state
        if "score" in turn:
            score_along(m, device, turn["score"])
            continue
        if "weights" in turn:
            with _patient(pulse, turn):
                take_over(m, partial(_own_weights, turn["weights"], weights))  # what was wrong, rank 0 says
            continue
        *before, stepped = turn["events"]
        state = _landed(m, state, flights, before)
        state, plan = schedule(state, m.policy)
        if plan is not None:
            state, plan = speculate(state, plan, dict(stepped["drafts"]))
        pulse.step = state.step - 1
        _agree(m, pulse.step, "plan", "none" if plan is None else plan_digest(plan), stepped["plan"])
        if plan is not None:
            flight, device = launch(m, device, rebase(state, plan, device.kv.step))
            if isinstance(flight, Failed):
                raise AgentInferError(flight.reason)
            finished, device, _ = finish(m, device, flight, lambda _seq: None)  # rank 0 knows, and tells
            if isinstance(finished, Failed):
                raise AgentInferError(finished.reason)
            flights.append(finished)
        state, _ = flush(state)
    raise RankLost("rank 0 told no end")


def _own_weights(folder: str | None, weights: Callable[[], Source] | None) -> Source:
    if folder is not None:
        return folder
    if weights is None:
        raise CheckpointError("has no weights of its own to swap: give a folder, or each rank's to follow_rank")
    return weights()


def _landed(m: Machine, state: EngineState, flights: deque[Flight], events: Iterable[Turn]) -> EngineState:
    """*state* after what rank 0 heard: from clients, and from the device."""
    for said in events:
        if said["event"] != "Landed":
            state = fold(state, (decode_event(said),))
            continue
        state, _ = settle(state, flights.popleft(), partial(_same_tokens, m, said))
    return state


def _same_tokens(m: Machine, said: Turn, event: Event, _state: EngineState) -> None:
    """A Note of what landed here, compared with what rank 0 *said*."""
    if not isinstance(event, Landed):
        raise AgentInferError(f"step {said['step']} failed on rank {m.ranks.tp.rank}: {event}")
    _agree(m, event.step, "tokens", _checksum(event.tokens, event.bad), said["tokens"])


def _agree(m: Machine, step: int, what: str, own: object, wanted: object) -> None:
    if own != wanted:
        raise Diverged(f"rank {m.ranks.tp.rank} diverged in step {step}: its {what} ({own}) is not rank 0's ({wanted})")
