"""Structured output in an engine: outputs have their forms, whatever happens to them; other rows do not notice."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import test_grammar
import toys
from agentinfer.build import Settings
from agentinfer.demo import default_cache, ensure_demo
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, generate, open_engine, run, stream
from agentinfer.result import Result
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest, has_work, live, tokens_of
from agentinfer.state.event import Event, Raised, Stepped
from agentinfer.state.history import rewind
from agentinfer.state.plan import Output
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.trace import Trace, verify
from agentinfer.text import load_text
from test_ranks import SETTINGS, threads, together
from tiny import write_tiny

PROMPTS = [[5, 6, 7], [9] * 20, [3, 1, 4, 1, 5], [8, 8], [2] * 9]
FORMS: tuple[dict[str, Any] | None, ...] = (
    {
        "json": {
            "type": "object",
            "properties": {"ab": {"type": "boolean"}, "n": {"enum": [7, 12, "ab"]}},
            "required": ["n"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
    None,
    {"regex": "(ab|12|\u00fc){6,12}"},
    {"choice": ["a" * 9, "abababab", "true or false"]},
    {"grammar": 'start: "(" start ")" start | "ab" start | "12"'},
)
PARAMS = [
    SamplingParams(max_tokens=24, temperature=1.0, seed=40 + i, structured_outputs=form, ignore_eos=form is None)
    for i, form in enumerate(FORMS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are the bytes, some longer ones, and an end token."""
    tokenizer = toys.byte_level(test_grammar.PIECES)
    end = tokenizer.token_to_id("<|im_end|>")
    place = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=300, eos_token_id=end)
    return toys.folder_of(place, tokenizer, toys.CHATML)


def settings(**changes: Any) -> Settings:
    sizes = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "seed": 0}
    return Settings(**{**sizes, **changes})


def outputs(results: list[Result]) -> list[tuple[int, ...]]:
    assert [one.error for one in results] == [None] * len(results)
    return [one.output_ids for one in results]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """What each request gives alone, each step landed before the next is planned."""
    engine = open_engine(folder, settings(overlap=False))
    found = [generate(engine, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert found[0].finish_reason == found[3].finish_reason == "stop"
    return outputs(found)


def test_outputs_have_the_form_of_their_schema(folder: Path) -> None:
    """200 outputs of a random model match 200 random schemas, but for those that max_tokens cuts off."""
    wanted = [test_grammar.schema(random.Random(seed), 3) for seed in range(200)]
    each = [
        SamplingParams(
            max_tokens=150, temperature=1.0, seed=i, structured_outputs={"json": one, "disable_any_whitespace": True}
        )
        for i, one in enumerate(wanted)
    ]
    engine = open_engine(folder, settings(num_blocks=600, max_num_seqs=16))
    found = generate(engine, [[1 + i % 200, 7] for i in range(200)], each)
    done = [i for i, one in enumerate(found) if one.finish_reason == "stop"]
    assert {one.finish_reason for one in found} <= {"stop", "length"}
    assert len(done) > 150
    for i in done:
        assert found[i].text is not None
        jsonschema.validate(json.loads(found[i].text), wanted[i])
    assert len(engine.grammars.walks) <= 16
    assert violations(engine.world.state) == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "shape",
    [{}, {"num_blocks": 12, "prefix_cache": False}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 2}],
    ids=["roomy", "preempted", "chunked", "two rows"],
)
def test_the_tokens_are_those_of_each_request_alone(
    folder: Path, alone: list[tuple[int, ...]], shape: dict[str, Any], *, overlap: bool
) -> None:
    """In a batch with others, with a form or without, preempted, in chunks, overlapped: the same tokens."""
    preempted = set[int]()

    def note(event: Event, state: EngineState) -> None:
        if isinstance(event, Stepped) and state.last is not None:
            preempted.update(state.last.preempted)

    engine = open_engine(folder, settings(overlap=overlap, **shape), note=note)
    assert outputs(generate(engine, PROMPTS, PARAMS)) == alone
    assert outputs(generate(engine, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]
    assert bool(preempted) == ("num_blocks" in shape)


def test_streams_are_the_same(folder: Path, alone: list[tuple[int, ...]]) -> None:
    """A stream gives the tokens and the text of the whole."""
    engine = open_engine(folder, settings())
    deltas = list(stream(engine, PROMPTS[0], PARAMS[0]))
    assert tuple(token for delta in deltas for token in delta.token_ids) == alone[0]
    json.loads("".join(delta.text for delta in deltas))


@pytest.mark.parametrize("overlap", [True, False])
def test_forked_and_rewound_sequences_keep_their_form(folder: Path, *, overlap: bool) -> None:
    """A child with its parent's seed gives its tokens, one with another seed the form; so does each after a rewind."""
    engine = open_engine(folder, settings(overlap=overlap))
    (want,) = generate(engine, [PROMPTS[2]], PARAMS[2])
    parent = engine.add(Request(tuple(PROMPTS[2]), PARAMS[2]))
    while len(tokens_of(engine.world.state, parent)) < len(PROMPTS[2]) + 4:
        engine.step()
    old = engine.world.state
    children = engine.fork(parent, (None, 1, 2, 3))
    ends = {done.seq: done.output for done in run(engine, [parent, *children])}
    assert ends[parent] == ends[children[0]] == want.output_ids
    assert len({ends[child] for child in children}) > 1
    assert engine.text is not None
    for output in ends.values():
        assert re.fullmatch("(ab|12|\u00fc){6,12}", toys_text(engine, output))
    engine.reset(rewind(old, engine.world.state))
    (again,) = run(engine, [parent])
    assert again.output == want.output_ids


@given(data=st.data())
def test_whatever_happens_on_the_way(folder: Path, alone: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Requests that arrive, fork, leave and are rewound at any time: who stays has the tokens that it has alone."""
    draw = data.draw
    engine = open_engine(folder, settings(overlap=draw(st.booleans()), num_blocks=draw(st.sampled_from((14, 60)))))
    which: dict[int, int] = {}
    gone = set[int]()
    ends: dict[int, tuple[int, ...]] = {}
    for _ in range(draw(st.integers(5, 30))):
        running = sorted(live(engine.world.state) - gone)
        match draw(st.sampled_from(("add", "add", "fork", "leave", "rewind", "step", "step", "step", "step"))):
            case "add":
                i = draw(st.integers(0, len(PROMPTS) - 1))
                which[engine.add(Request(tuple(PROMPTS[i]), PARAMS[i]))] = i
            case "fork" if running:
                parent = draw(st.sampled_from(running))
                which.update(dict.fromkeys(engine.fork(parent), which[parent]))
            case "leave" if running:
                engine.abort(left := draw(st.sampled_from(running)))
                gone.add(left)
            case "rewind":
                engine.reset(rewind(engine.world.state, engine.world.state))
            case _:
                told(engine.step(), ends)
    while engine.unfinished:
        told(engine.step(), ends)
    assert {seq: ends.get(seq) for seq in which if seq not in gone} == {
        seq: alone[i] for seq, i in which.items() if seq not in gone
    }
    assert violations(engine.world.state) == []


def told(output: Output | None, ends: dict[int, tuple[int, ...]]) -> None:
    if output is not None:
        ends.update((done.seq, done.output) for done in output.finished)


def toys_text(engine: Engine, output: tuple[int, ...]) -> str:
    assert engine.text is not None
    assert output[-1] in engine.machine.limits.eos_ids
    return engine.text.tokenizer.decode(list(output[:-1]))


def test_traces_replay_without_grammars(folder: Path) -> None:
    """The control plane lives through a run with forms again, the failed one too, and sees no grammar."""
    events, digests = list[Event](), list[str]()

    def note(event: Event, state: EngineState) -> None:
        events.append(event)
        digests.append(digest(state))

    engine = open_engine(folder, settings(), note=note)
    short = SamplingParams(min_tokens=20, structured_outputs={"choice": ["ab"]})
    generate(engine, [*PROMPTS, [7]], [*PARAMS, short])
    assert [type(event) for event in events].count(Raised) == 1
    assert verify(Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))) is None


@pytest.mark.parametrize("overlap", [True, False])
def test_what_can_not_go_on_fails_alone(folder: Path, alone: list[tuple[int, ...]], *, overlap: bool) -> None:
    """An output that is complete before min_tokens, or that other parameters leave no token, is an error of its own."""
    engine = open_engine(folder, settings(overlap=overlap))
    short = SamplingParams(min_tokens=20, structured_outputs={"choice": ["b"]})
    nothing = SamplingParams(allowed_token_ids=(98,), structured_outputs={"choice": ["aa"]})
    *found, early, none = generate(engine, [*PROMPTS, [7], [7]], [*PARAMS, short, nothing])
    assert outputs(found) == alone
    assert early.finish_reason == none.finish_reason == "error"
    assert "structured_outputs: complete after 1 tokens, and min_tokens is 20" in str(early.error)
    assert "structured_outputs: allowed_token_ids has none that may come after 0 tokens" in str(none.error)
    assert violations(engine.world.state) == []


def test_forms_with_other_parameters(folder: Path) -> None:
    """min_tokens keeps an output going where its form lets it; max_tokens cuts it off; a stop string or token ends it;
    bias, allowed ids, bad words and filters choose among what the form allows.
    """
    engine = open_engine(folder, settings())

    def text(form: dict[str, Any], **how: Any) -> tuple[str | None, str]:
        (found,) = generate(engine, [[7]], SamplingParams(**{"seed": 1, **how}, structured_outputs=form))
        assert found.error is None
        return found.text, found.finish_reason

    some = {"regex": "(a|b|12)*"}
    (words, reason) = text(
        some, min_tokens=12, max_tokens=40, allowed_token_ids=(97, 98, *engine.machine.limits.eos_ids)
    )
    assert reason == "stop"
    assert len(words or "") >= 12
    assert set(words or "") <= set("ab")
    assert text({"regex": "a{90}"}, max_tokens=10)[1] == "length"
    assert text({"regex": "b{5}(12)+"}, stop="12") == ("bbbbb", "stop")
    assert text({"regex": "(a|b)x"}, stop_token_ids=(97,), logit_bias={97: 100}) == ("", "stop")
    assert text({"regex": "(a|b)x"}, bad_words=["a"], top_k=1) == ("bx", "stop")
    assert text({"regex": "(a|b)x"}, logit_bias={97: -100}, temperature=0.5, top_p=0.5) == ("bx", "stop")
    assert text({"choice": ["ab", "ba"]}, temperature=0.0)[0] in ("ab", "ba")


def test_refused_at_intake(folder: Path, tmp_path: Path) -> None:
    """What is no grammar is refused by add, and its prompt alone by generate; a model without tokenizer refuses all."""
    engine = open_engine(folder, settings())
    bad = SamplingParams(structured_outputs={"json": {"type": "strin"}}, max_tokens=4)
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: Invalid type: strin"):
        engine.add(Request((1, 2), bad))
    good, refused = generate(engine, [[1], [1]], [evolve(bad, structured_outputs={"regex": "a"}), bad])
    assert (good.finish_reason, refused.finish_reason) == ("stop", "rejected")
    assert not has_work(engine.world.state)
    (none,) = generate(open_engine(write_tiny(tmp_path), settings()), [[1]], bad)
    assert none.error == "structured_outputs: is about text, but the checkpoint has no tokenizer"


@pytest.mark.parametrize("overlap", [True, False])
def test_several_ranks(folder: Path, alone: list[tuple[int, ...]], *, overlap: bool) -> None:
    """Rank 0 alone knows grammars; all ranks come to the same tokens, though one request fails."""
    short = SamplingParams(min_tokens=20, structured_outputs={"choice": ["ab"]})

    def drive(engine: Engine) -> list[Result]:
        engine.text = engine.grammars.text = load_text(folder)
        return generate(engine, [*PROMPTS, [7]], [*PARAMS, short])

    shared = evolve(SETTINGS, num_blocks=200, overlap=overlap)
    found, digests = together(folder, 2, threads, drive, shared)
    assert outputs(found[:-1]) == alone
    assert found[-1].finish_reason == "error"
    assert len(digests[0]) > 5


@pytest.mark.slow
def test_the_demo_model_writes_what_it_is_asked_for() -> None:
    """SmolLM2 gives a person as JSON, a date by its regular expression, a choice, and a sum by its grammar."""
    engine = open_engine(ensure_demo(default_cache(), print), Settings(num_blocks=400, max_model_len=512))
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asks = {
        "Describe a person as JSON: ": {"json": person},
        "The first landing on the Moon was on ": {"regex": r"\d{4}-\d{2}-\d{2}"},
        "Is the sky blue? Answer: ": {"choice": ["yes", "no"]},
        "A sum: ": {"grammar": 'start: NUMBER (" + " NUMBER)+ " = " NUMBER\nNUMBER: /[0-9]{1,3}/'},
    }
    for temperature in (0.0, 1.0):
        each = [
            SamplingParams(max_tokens=96, temperature=temperature, seed=4, structured_outputs=form)
            for form in asks.values()
        ]
        first, date, choice, sums = (one.text or "" for one in generate(engine, list(asks), each))
        jsonschema.validate(json.loads(first), person)
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
        assert choice in ("yes", "no")
        assert re.fullmatch(r"\d{1,3}( \+ \d{1,3})+ = \d{1,3}", sums)
