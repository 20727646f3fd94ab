"""The form of an output: exactly one kind, checked by name; plain data in digests and traces."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

import engines
from agentinfer.errors import InvalidRequest
from agentinfer.state.admit import arrive
from agentinfer.state.engine import digest, initial
from agentinfer.state.event import Arrived
from agentinfer.state.request import SamplingParams, needs_host
from agentinfer.state.structured import StructuredOutputsParams
from agentinfer.state.trace import decode_event, encode_event

FORMS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"b": {}, "a": {}}}},
    {"json": '{"type": "string"}', "whitespace_pattern": " ?"},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": "a|\u00fc"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=3, **fields)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_traces_hold_forms(form: dict[str, Any]) -> None:
    """An arrival with a form is the same after its way through JSON."""
    event = Arrived(engines.request((1, 2), structured_outputs=StructuredOutputsParams(**form)))
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


def test_digests_tell_forms_apart() -> None:
    """Two states that differ in the form of an output have two names, waiting and running."""
    names: set[str] = set()
    for form in (None, *FORMS):
        given = None if form is None else StructuredOutputsParams(**form)
        hand = engines.Hand.of(engines.limits(), engines.request((1, 2), 3, structured_outputs=given))
        names.add(digest(hand.state))
        hand.step()
        names.add(digest(hand.state))
    assert len(names) == 2 * (1 + len(FORMS))
    state, _ = arrive(initial(engines.limits()), engines.request((1,), structured_outputs={"json_object": True}))
    assert digest(state) not in names


def test_mappings_are_json_and_keep_their_order() -> None:
    """A schema given as a mapping is its JSON text, properties in the order that they have."""
    form = StructuredOutputsParams(json={"properties": {"b": {}, "a": {"const": "\u00fc"}}})
    assert form.json == '{"properties": {"b": {}, "a": {"const": "\u00fc"}}}'
    assert params(structured_outputs={"json": form.json}).structured_outputs == form
    assert params(structured_outputs=MappingProxyType({"choice": ["a"]})).structured_outputs is not None


def test_rows_with_a_form_need_the_host() -> None:
    """Whoever asks for a form waits for the token before; who does not, does not."""
    assert needs_host(params(structured_outputs={"regex": "a"}))
    assert not needs_host(params())


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "structured_outputs: must have exactly one of json, json_object, regex, choice, grammar, not none"),
        ({"json_object": False}, "structured_outputs: must have exactly one of .* not none"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs: must have exactly one of .*, not regex and choice"),
        ({"regexp": "a"}, "structured_outputs: has no field 'regexp': its fields are json, "),
        ({"json": 5}, "structured_outputs.json: must be a text, not 5"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json: is no JSON: "),
        ({"json": {"const": {1, 2}}}, "structured_outputs.json: is no JSON: "),
        ({"json_object": 1}, "structured_outputs.json_object: must be true or false, not 1"),
        ({"regex": b"a"}, "structured_outputs.regex: must be a text, not b'a'"),
        ({"regex": "a\ud800"}, "structured_outputs.regex: is no valid Unicode"),
        ({"choice": "yes"}, "structured_outputs.choice: must be a list of at least one text, not 'yes'"),
        ({"choice": []}, "structured_outputs.choice: must be a list of at least one text"),
        ({"choice": ["a", ""]}, "structured_outputs.choice: must hold texts of at least one character, not ''"),
        ({"choice": [3]}, "structured_outputs.choice: must hold texts of at least one character, not 3"),
        ({"grammar": 3}, "structured_outputs.grammar: must be a text, not 3"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern: is for json"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace: is for json"),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern: can not be together",
        ),
        ("yes", "structured_outputs: must be a StructuredOutputsParams, not 'yes'"),
    ],
    ids=str,
)
def test_bad_forms_are_refused(form: Any, says: str) -> None:
    """What is no form is refused, with the name of the field."""
    with pytest.raises(InvalidRequest, match=says):
        params(structured_outputs=form)


def test_what_is_complete_must_end() -> None:
    """A form and ignore_eos exclude each other."""
    with pytest.raises(InvalidRequest, match="ignore_eos: can not be together with structured_outputs"):
        params(structured_outputs={"regex": "a"}, ignore_eos=True)
