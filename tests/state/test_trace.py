"""Traces: every event survives JSON, a changed digest is found, and what is no trace is refused by name."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentinfer.errors import AgentInferError
from agentinfer.state.event import Aborted, Arrived, Failed, Forked, Landed, Stepped, Stopped
from agentinfer.state.ids import SeqId
from agentinfer.state.policy import reserve
from agentinfer.state.trace import decode_event, encode_event, encode_header, read_trace, verify
from agentinfer.testing import limits as any_limits
from agentinfer.testing import requests
from engines import drive, limits, request

EVENTS = (
    Aborted(SeqId(3), 'said "no"'), Stopped(SeqId(3), 2, "\n\n"), Forked(SeqId(1), (None, 5)), Stepped(),
    Landed(4, (1, 2), (1,)), Failed(2, (SeqId(0), SeqId(7)), "out of memory"),
)  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_json(event) -> None:
    """Encoded, written, read and decoded, an event is equal to what it was."""
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


@given(st.data())
def test_a_request_survives_json(data: st.DataObject) -> None:
    """So does any request, with all its parameters and its salt."""
    event = Arrived(data.draw(requests(data.draw(any_limits()))))
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


def recorded() -> list[str]:
    engine = drive(limits(eos_ids=(3,)), reserve, overlap=True)
    for i in range(4):
        engine.arrive(request((i + 1, 2, 3), 5))
        engine.step()
    engine.drain()
    lines = [encode_header(engine.limits, "reserve")]
    pairs = zip(engine.events, engine.digests, strict=True)
    return [json.dumps(line) for line in [*lines, *({**encode_event(e), "digest": d} for e, d in pairs)]]


def test_a_file_is_the_run_again() -> None:
    """A trace written as JSON lines is read back with its limits, policy and events, and every digest agrees."""
    trace = read_trace([json.loads(line) for line in recorded()])
    assert trace.limits == limits(eos_ids=(3,))
    assert trace.policy == "reserve"
    assert verify(trace) is None
    for i in (0, len(trace.digests) // 2, len(trace.digests) - 1):
        digests = (*trace.digests[:i], "0" * 16, *trace.digests[i + 1 :])
        assert verify(evolve(trace, digests=digests)) == i


def test_another_policy_does_not_replay() -> None:
    """The same events under the other policy, or other limits, are another history."""
    trace = read_trace([json.loads(line) for line in recorded()])
    assert verify(evolve(trace, limits=evolve(trace.limits, max_num_batched_tokens=2))) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "not a trace"),
        (lambda lines: lines[1:], "not a trace"),
        (lambda lines: [{**lines[0], "agentinfer_trace": 99}, *lines[1:]], "99"),
        (lambda lines: [{**lines[0], "policy": "mine"}, *lines[1:]], "mine"),
        (lambda lines: [{**lines[0], "limits": {}}, *lines[1:]], "incomplete"),
        (lambda lines: [*lines, {"event": "Stepped"}], "digest"),
        (lambda lines: [*lines, {"event": "Danced", "digest": ""}], "Danced"),
        (lambda lines: [*lines, {"event": "Landed", "digest": ""}], "Landed"),
        (lambda lines: [*lines, {"event": "Arrived", "digest": "", "request": {"prompt": [1]}}], "Arrived"),
    ],
)
def test_what_is_no_trace_is_refused(change, message: str) -> None:
    """Missing headers, other versions, unknown policies and broken events are errors that say so."""
    with pytest.raises(AgentInferError, match=message):
        read_trace(change([json.loads(line) for line in recorded()]))
