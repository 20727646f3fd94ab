"""A recorded run as JSON data, and the proof that replaying it gives the same states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from agentinfer.errors import AgentInferError
from agentinfer.state import event as events_module
from agentinfer.state.engine import digest
from agentinfer.state.event import (
    VERSION,
    Aborted,
    Arrived,
    Event,
    Failed,
    Forked,
    Landed,
    Raised,
    Stepped,
    Stopped,
    Swapped,
)
from agentinfer.state.history import replay
from agentinfer.state.limits import Limits
from agentinfer.state.policy import POLICIES
from agentinfer.state.request import Request, SamplingParams


@frozen
class Trace:
    """A recorded run: what is needed to live through it again, and the digest after each event."""

    limits: Limits
    policy: str
    events: tuple[Event, ...]
    digests: tuple[str, ...]


def verify(trace: Trace) -> int | None:
    """Replay *trace*; the number of the first event after which the digest differs, or None if all agree."""
    moments = replay(trace.limits, trace.events, POLICIES[trace.policy])
    next(moments)
    for i, (moment, name) in enumerate(zip(moments, trace.digests, strict=True)):
        if digest(moment.state) != name:
            return i
    return None


def encode_header(limits: Limits, policy: str) -> dict[str, Any]:
    """The first line of a trace file, as JSON data."""
    return {"agentinfer_trace": VERSION, "limits": attrs.asdict(limits), "policy": policy}


def encode_event(event: Event) -> dict[str, Any]:
    """*event* as JSON data."""
    return {"event": type(event).__name__, **attrs.asdict(event)}


def decode_event(data: Mapping[str, Any]) -> Event:
    """The event that `encode_event` made *data* of. Raises AgentInferError if it is none."""
    fields = {name: value for name, value in data.items() if name not in ("event", "digest")}
    kind = getattr(events_module, str(data.get("event")), None)
    try:
        if kind is Arrived:
            asked = fields["request"]
            return Arrived(Request(asked["prompt"], SamplingParams(**asked["params"]), asked["salt"]))
        if kind in (Aborted, Stopped, Forked, Swapped, Stepped, Landed, Failed, Raised):
            return kind(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise AgentInferError(f"not an event {data['event']}: {error!r}") from error
    raise AgentInferError(f"unknown event {data.get('event')!r}")


def read_trace(lines: Sequence[Mapping[str, Any]]) -> Trace:
    """The trace in the JSON objects of a file. Raises AgentInferError naming what is wrong with it."""
    if not lines or "agentinfer_trace" not in lines[0]:
        raise AgentInferError("not a trace: its first line has no agentinfer_trace")
    head = lines[0]
    if head["agentinfer_trace"] != VERSION:
        raise AgentInferError(f"a trace of version {head['agentinfer_trace']!r}; this reads {VERSION}")
    if head.get("policy") not in POLICIES:
        raise AgentInferError(f"the trace's policy {head.get('policy')!r} is none of {', '.join(POLICIES)}")
    try:
        limits = Limits(**head["limits"])
        digests = tuple(str(line["digest"]) for line in lines[1:])
    except (KeyError, TypeError) as error:
        raise AgentInferError(f"an incomplete trace: {error}") from error
    return Trace(limits, str(head["policy"]), tuple(decode_event(line) for line in lines[1:]), digests)
