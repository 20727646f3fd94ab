"""What requests may ask of their logits, and what of it is refused, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import fields

from agentinfer.errors import InvalidRequest
from agentinfer.state.admit import validate
from agentinfer.state.event import Arrived
from agentinfer.state.request import Request, SamplingParams, biased, edits_logits, needs_host, penalised
from agentinfer.state.trace import decode_event, encode_event
from engines import limits

nan, inf = float("nan"), float("inf")

WRONG: list[tuple[str, Any]] = [
    *[(name, x) for name in ("presence_penalty", "frequency_penalty") for x in (-2.1, 2.1, nan, inf, "1", None, True)],
    *[("repetition_penalty", x) for x in (0, -1, nan, inf, "1", None, True)],
    *[("logit_bias", {key: 1}) for key in ("abc", "-1", -1, 1.0, None, "", 2**31)],
    *[("logit_bias", {5: x}) for x in (-101, 101, nan, inf, "1", None, True)],
    *[("logit_bias", x) for x in (5, "5", [5], [(5,)], [(5, 1, 1)], [(5, 1), (5, 2)], [(5, 1), ("5", 2)], None)],
    *[("allowed_token_ids", x) for x in ([], 5, "5", [-1], [2**31], [1.0], [True], [None])],
    *[("bad_words", x) for x in (5, [5], [""], [[]], [[-1]], [[True]], [None], [["a"]], None)],
    *[("logits_processors", x) for x in (5, [5], [""], [None], None)],
    *[(name, {"a": 1}) for name in ("bad_words", "logits_processors", "stop")],
    *[(name, x) for name in ("allowed_token_ids", "stop_token_ids") for x in ({5: 1}, b"12", bytearray(b"12"))],
    *[("bad_words", x) for x in (b"no", [b"no"], ["no", b"no"])],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_value_out_of_its_range_is_refused_by_name(name: str, value: Any) -> None:
    """Numbers outside of vLLM's ranges, NaN, keys that are no ids, empty lists, mappings: refused, naming the field."""
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.field == name


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams)])
def test_no_field_takes_whatever_it_is_given(name: str) -> None:
    """Each field that there is, or will be, refuses what is nothing of its kind, by its name."""
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{name: object()})
    assert refusal.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "id_"),
    [
        ("logit_bias", {96: 1}, 96),
        ("logit_bias", {"96": 1, 3: 1}, 96),
        ("allowed_token_ids", [3, 97], 97),
        ("bad_words", [[1, 2], [5, 98]], 98),
        ("stop_token_ids", [96], 96),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused_before_the_engine(name: str, value: Any, id_: int) -> None:
    """The field and the id are named; the largest id of the vocabulary is fine."""
    with pytest.raises(InvalidRequest, match=rf"{name}.* {id_} "):
        validate(limits(vocab_size=96), Request((1,), SamplingParams(max_tokens=1, **{name: value})))
    validate(limits(vocab_size=id_ + 1), Request((1,), SamplingParams(max_tokens=1, **{name: value})))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [3, 4], "bad_words": [[3], [4], [5]]}, "bad_words"),
        ({"bad_words": [[i] for i in range(8)]}, "bad_words"),
        ({"allowed_token_ids": [3, 4], "stop_token_ids": [3, 4], "min_tokens": 1}, "min_tokens"),
        ({"bad_words": [[i] for i in range(1, 8)], "stop_token_ids": [0], "min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": range(8), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_leaves_no_token_to_choose_is_refused(params: dict[str, Any], name: str) -> None:
    """Of allowed, bad and end tokens together, at least one must be left."""
    with pytest.raises(InvalidRequest) as refusal:
        validate(limits(vocab_size=8), Request((1,), SamplingParams(max_tokens=2, **params)))
    assert refusal.value.field == name
    params = {**params, "min_tokens": 0, "bad_words": params.get("bad_words", [])[1:]}
    validate(limits(vocab_size=8), Request((1,), SamplingParams(max_tokens=2, **params)))


def test_texts_need_a_tokenizer() -> None:
    """Who validates a request knows token ids only: a bad word that is still text is refused by name."""
    with pytest.raises(InvalidRequest, match=r"bad_words.*'darn' is text"):
        validate(limits(), Request((1,), SamplingParams(max_tokens=1, bad_words=[[1], "darn"])))


def test_a_bias_is_read_from_json() -> None:
    """Keys may be texts, as JSON has them; the order they came in does not matter."""
    assert SamplingParams(logit_bias={"7": -100, 5: 2.5}).logit_bias == ((5, 2.5), (7, -100))
    assert SamplingParams(logit_bias={5: 1, 7: 2}) == SamplingParams(logit_bias=[(7, 2), (5, 1)])


def test_a_trace_holds_what_was_asked() -> None:
    """Through JSON and back, an arrival is the same."""
    params = SamplingParams(
        logit_bias={7: -1.5, 5: 2}, allowed_token_ids=[5, 7], bad_words=["no", (1, 2)], logits_processors=["a", "b"],
        presence_penalty=-2, frequency_penalty=0.25, repetition_penalty=1.5,
    )  # fmt: skip
    event = Arrived(Request((1, 2), params))
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


@pytest.mark.parametrize(
    ("params", "which"),
    [
        ({}, ()),
        ({"min_tokens": 2, "temperature": 0.5, "top_k": 4}, ()),
        ({"logit_bias": {1: 0.0}}, (biased,)),
        ({"allowed_token_ids": [1]}, (biased,)),
        ({"bad_words": [[1]]}, (biased,)),
        ({"bad_words": [[1, 2]]}, (biased, needs_host)),
        ({"logits_processors": "mine"}, (needs_host,)),
        ({"presence_penalty": 1}, (penalised,)),
        ({"frequency_penalty": -1}, (penalised,)),
        ({"repetition_penalty": 0.5}, (penalised,)),
    ],
)
def test_who_asks_for_what(params: dict[str, Any], which: tuple[Any, ...]) -> None:
    """Requests that ask for nothing new have their logits left alone; the others say who has work with them."""
    asked = SamplingParams(**params)
    assert tuple(f for f in (biased, penalised, needs_host) if f(asked)) == which
    assert edits_logits(asked) == bool(which)
