"""Grammars: the mask is a function of the grammar and the output, whatever is remembered; bad grammars are refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import toys
from agentinfer import grammar
from agentinfer.errors import InvalidRequest
from agentinfer.grammar import GrammarFailed, Grammars, allowed, check_form, compile_grammar, mask_of, vocabulary_of
from agentinfer.state.ids import SeqId
from agentinfer.state.limits import Limits
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.structured import StructuredOutputsParams
from agentinfer.text import Text, decode, load_text

PIECES = (b'{"', b'":', b'", "', b'"}', b"true", b"12", b"ab", b"abc", b" a", "\u00fc".encode(), b"\xf0\x9f")
KINDS: tuple[dict[str, Any], ...] = (
    {"choice": ("a", "ab", "abc", "b a", "\u00fcx")},
    {"regex": "(a|ab|12)*b?"},
    {"regex": "[a-c\u00fc]{2,6}"},
    {"json": {"type": "object", "properties": {"ab": {"type": "boolean"}, "a": {"enum": [1, 12, "x"]}}}},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}, "disable_any_whitespace": True},
    {"grammar": 'start: "(" start ")" start | "ab" |'},
    {"json_object": True},
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A byte-level tokenizer with some longer tokens, among them one that ends within a character."""
    found = load_text(toys.folder_of(tmp_path_factory.mktemp("text"), toys.byte_level(PIECES), toys.CHATML))
    assert found is not None
    return found


def limits(text: Text, **changes: Any) -> Limits:
    sizes = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 32}
    return Limits(**{**sizes, "vocab_size": 310, "eos_ids": text.end_ids, **changes})


@pytest.fixture(scope="module")
def fresh(text: Text) -> Grammars:
    """Grammars for all tests: tokenizer and limits."""
    found = Grammars(text, limits(text))
    vocabulary_of(found)
    return found


def forgetful(g: Grammars, **changes: Any) -> Grammars:
    """*g*, but that it remembers nothing yet."""
    return evolve(g, compiled=type(g.compiled)(), walks=type(g.walks)(), **changes)


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def asked(kind: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind)


def walk(g: Grammars, form: StructuredOutputsParams, rng: random.Random, most: int = 200) -> tuple[int, ...] | None:
    """A random output of *form*, its end token included; None if it is longer than *most*."""
    (end,), output = g.limits.eos_ids, ()
    while len(output) < most:
        may = ids(allowed(g, 0, form, output))
        # Ends when it may, and does not stay in strings for ever.
        chosen = end if end in may and rng.random() < 0.3 else rng.choice(may)
        output = (*output, chosen)
        if chosen == end:
            return output
    return None


@given(st.data())
def test_what_is_remembered_changes_nothing(fresh: Grammars, data: st.DataObject) -> None:
    """The masks of sequences that grow, fork, are preempted and rewound are those computed from nothing."""
    forms = [asked(kind) for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))]
    g = forgetful(fresh, limits=evolve(fresh.limits, max_num_seqs=2))
    (end,) = fresh.limits.eos_ids
    outputs = {i: (form, ()) for i, form in enumerate(forms)}
    for _ in range(data.draw(st.integers(1, 30))):
        seq = data.draw(st.sampled_from(sorted(outputs)))
        form, output = outputs[seq]
        mask = allowed(g, seq, form, output)
        assert ids(mask) == ids(allowed(forgetful(fresh), 99, form, output))
        may = [token for token in ids(mask) if token != end]
        match data.draw(st.sampled_from(("grow", "grow", "grow", "fork", "rewind"))):
            case "grow" if may:
                outputs[seq] = (form, (*output, data.draw(st.sampled_from(may))))
            case "fork" if len(outputs) < 5:
                outputs[max(outputs) + 1] = outputs[seq]
            case _:
                outputs[seq] = (form, output[: data.draw(st.integers(0, len(output)))])
    assert len(g.walks) <= 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))
def test_every_token_counts_once(fresh: Grammars, text: Text, kind: dict[str, Any]) -> None:
    """A token is allowed exactly if the bytes so far, with its own, begin some output of that form, but that where the
    text is given the tokenizer's own next token is the only one.
    """
    form, rng = asked(kind), random.Random(1)
    (end,) = text.end_ids
    output: tuple[int, ...] = ()
    spelled = {i: vocabulary_of(fresh).tokenizer.decode_bytes([i]) for i in range(text.tokenizer.get_vocab_size())}
    think, no_text = text.tokenizer.token_to_id("<think>"), 255
    plain = [i for i in spelled if i not in text.special_ids and i not in (think, no_text)]
    matcher = compile_grammar(fresh, form)
    for _ in range(12):
        may = set(ids(allowed(fresh, 1, form, output)))
        begun = [b for token in output for b in spelled[token]]  # tokens 0 to 255 are the bytes
        fit = {i for i in plain if _fits(matcher, [*begun, *spelled[i]])}
        assert may - {end} == fit or (len(may) == 1 and may < fit)
        left = sorted(may - {end})
        if not left:
            break
        output = (*output, rng.choice(left))


def _fits(matcher: Any, tokens: list[int]) -> bool:
    return matcher.deep_copy().validate_tokens(tokens) == len(tokens)


def test_end_tokens(text: Text, fresh: Grammars) -> None:
    """An end token may come where the output may end, must come where it is complete, and can not come before."""
    (end,) = text.end_ids
    form = asked({"choice": ("a", "ab")})
    a, b = (text.tokenizer.token_to_id(x) for x in "ab")
    ab = text.tokenizer.token_to_id("ab")
    assert ids(allowed(fresh, 0, form, ())) == sorted((a, ab))
    assert ids(allowed(fresh, 0, form, (a,))) == sorted((b, end))
    assert ids(allowed(fresh, 0, form, (a, b))) == ids(allowed(fresh, 0, form, (ab,))) == [end]


def test_an_end_token_with_a_text_ends(text: Text) -> None:
    """Where the end token has a text of its own, that text can not be had by it: it stays an end."""
    end = text.tokenizer.token_to_id("a")
    g = Grammars(text, limits(text, eos_ids=(end,)))
    assert end not in ids(allowed(g, 0, asked({"regex": "(a|b)b"}), ()))
    b = text.tokenizer.token_to_id("b")
    assert ids(allowed(g, 0, asked({"regex": "bb"}), (b, b))) == [end]


def test_several_end_tokens(text: Text) -> None:
    """All of the model's end tokens may end an output."""
    ends = tuple(text.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    g = Grammars(text, limits(text, eos_ids=ends))
    a = text.tokenizer.token_to_id("a")
    assert ids(allowed(g, 0, asked({"regex": "a"}), (a,))) == sorted(ends)


@pytest.mark.parametrize("size", [310, 277, 200])
def test_masks_are_as_wide_as_the_logits(text: Text, size: int) -> None:
    """Logits beyond the tokenizer's tokens are never allowed; tokens beyond the logits are left out."""
    (end,) = text.end_ids if size > max(text.end_ids) else (5,)
    g = Grammars(text, limits(text, vocab_size=size, eos_ids=(end,)))
    mask = allowed(g, 0, asked({"regex": "(?s:.)*"}), ())
    assert mask.shape == (-(-size // 32),)
    assert max(ids(mask)) < text.tokenizer.get_vocab_size()


SHAPES = ("string", "integer", "number", "boolean", "null", "enum", "const", "array", "object", "anyOf", "pattern")


def schema(rng: random.Random, depth: int) -> dict[str, Any]:  # noqa: PLR0911 - a shape a line
    """A random JSON schema."""
    shape = rng.choice(SHAPES if depth else SHAPES[:7])
    match shape:
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 8)}
        case "integer":
            return {"type": "integer", "minimum": rng.randrange(-20, 5), "maximum": rng.randrange(5, 300)}
        case "number":
            return {"type": "number", "minimum": -3, "exclusiveMaximum": 7.5}
        case "enum":
            return {"enum": rng.sample(["a", 1, None, True, "x y", 2.5, [1, "\u00fc"]], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice([{"a": [1, 2]}, "b", 7])}
        case "array":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": schema(rng, depth - 1),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "object":
            names = rng.sample(["a", "ab", "name", "x y", "\u00fc"], rng.randrange(1, 4))
            inner = {name: schema(rng, depth - 1) for name in names}
            needed = rng.sample(names, rng.randrange(len(names) + 1))
            return {"type": "object", "properties": inner, "required": needed, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(ab|12)+$", "^x?y$"])}
        case _:
            return {"type": shape}


def test_outputs_match_their_schemas(fresh: Grammars, text: Text) -> None:
    """Whatever is chosen among the allowed tokens, the text of 200 outputs is JSON of their 200 schemas."""
    done = 0
    for seed in range(200):
        rng = random.Random(seed)
        wanted = schema(rng, 3)
        form = asked({"json": wanted, "disable_any_whitespace": bool(seed % 2)})
        output = walk(forgetful(fresh), form, rng)
        if output is not None:
            jsonschema.validate(json.loads(decode(text, output)), wanted)
            done += 1
    assert done > 190


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"json": "{"}, "structured_outputs.json: is no JSON schema: EOF"),
        ({"json": {"type": "strin"}}, "structured_outputs.json: Invalid type: strin"),
        ({"json": "5"}, "structured_outputs.json: is no JSON schema: Expecting object"),
        ({"json": '{}},{"json_schema":{}'}, "structured_outputs.json: is no JSON schema: trailing"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "structured_outputs.json: Unsatisfiable schema"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json: no output has this form"),
        ({"json": {"$ref": "https://example.org/x"}}, "structured_outputs.json: .*does not fetch"),
        ({"json": {"not": {}}}, 'structured_outputs.json: .*"not"'),
        ({"json_object": True, "whitespace_pattern": "("}, "structured_outputs.json_object: .*unclosed group"),
        ({"regex": "a("}, "structured_outputs.regex: .*unclosed group"),
        ({"regex": "(?=a)a"}, "structured_outputs.regex: .*look-around"),
        ({"grammar": "start: b"}, 'structured_outputs.grammar: .*unknown name: "b"'),
        ({"grammar": "start: start"}, "structured_outputs.grammar: no output has this form"),
        ({"grammar": ""}, "structured_outputs.grammar: Empty grammar"),
        ({"grammar": "# " + "a" * grammar.MAX_BYTES}, "structured_outputs.grammar: has .* bytes, at most 131072"),
        ({"json": '{"items":' * 2000}, "structured_outputs.json: .*recursion limit"),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(map(str, x.items()))[:40],
)
def test_bad_grammars_are_refused(fresh: Grammars, kind: dict[str, Any], says: str) -> None:
    """A grammar that can not be compiled is refused, with its field, in one line."""
    with pytest.raises(InvalidRequest, match=says) as refused:
        compile_grammar(fresh, asked(kind))
    assert "\n" not in str(refused.value)


def chain(depth: int) -> str:
    """A grammar of rules that call each other so deep, which llguidance compiles by recursion."""
    return "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(depth)), f'a{depth}: "x"'])


def test_what_is_large_is_tried_apart(fresh: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would overflow the stack or compute for seconds is refused; it ends another process, not this one."""
    with pytest.raises(InvalidRequest, match=r"structured_outputs.grammar: is too large or too deep.*status -11"):
        compile_grammar(fresh, asked({"grammar": chain(9000)}))
    compile_grammar(fresh, asked({"grammar": chain(600)}))
    monkeypatch.setattr(grammar, "TRIAL_WALL_S", 0.0)
    with pytest.raises(InvalidRequest, match="takes longer than 0 s to compile"):
        compile_grammar(fresh, asked({"grammar": chain(601)}))


@pytest.mark.slow
def test_compiling_is_limited_in_time(fresh: Grammars) -> None:
    """A regular expression that takes a quarter of a minute is refused after two seconds of computing."""
    with pytest.raises(InvalidRequest, match=r"more than 2 s"):
        compile_grammar(fresh, asked({"regex": "a?" * 30_000}))


def test_large_schemas_that_people_write(fresh: Grammars) -> None:
    """Objects of a thousand optional properties, a thousand required ones and enums of 5,000 values have masks."""
    named = {f"property {i}": {"type": "string"} for i in range(1000)}
    for wanted in (
        {"type": "object", "properties": named},
        {"type": "object", "properties": named, "required": [*named]},
        {"enum": [f"value {i}" for i in range(5000)]},
    ):
        form = asked({"json": wanted})
        output: tuple[int, ...] = ()
        for _ in range(3):
            output = (*output, min(ids(allowed(fresh, 0, form, output))))


def test_outputs_that_do_not_fit(fresh: Grammars, text: Text) -> None:
    """Tokens that the grammar does not allow are an error, which leaves nothing behind."""
    form, (a, b) = asked({"regex": "a+"}), (text.tokenizer.token_to_id(x) for x in "ab")
    before = ids(allowed(fresh, 0, form, (a,)))
    with pytest.raises(GrammarFailed, match="structured_outputs: after 2 tokens: "):
        allowed(fresh, 0, form, (a, b))
    assert ids(allowed(fresh, 0, form, (a,))) == before


def test_masks_that_are_too_much_work(fresh: Grammars, text: Text) -> None:
    """A mask over the limits of work is an error that says so."""
    form = asked({"grammar": chain_of_pairs(60)})
    x = text.tokenizer.token_to_id("x")
    with pytest.raises((GrammarFailed, InvalidRequest), match="Too many items"):
        allowed(fresh, 0, form, (x, x))


def chain_of_pairs(depth: int) -> str:
    """A grammar with two to the power of *depth* ways to read one text."""
    return "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(depth)), f'a{depth}: "x"'])


def test_requests(fresh: Grammars, text: Text) -> None:
    """A request without a form may have any tokens; one whose output is complete before min_tokens fails, by name."""
    a = text.tokenizer.token_to_id("a")
    check_form(fresh, Request((1, 2)))
    assert mask_of(fresh, SeqId(0), Request((1, 2)), (1, 2)) is None
    asks = Request((1, 2), SamplingParams(structured_outputs=asked({"regex": "a+|b"}), min_tokens=3))
    check_form(fresh, asks)
    assert ids(mask_of(fresh, SeqId(0), asks, (1, 2, a))) == ids(allowed(fresh, 9, asked({"regex": "a+|b"}), (a,)))
    with pytest.raises(GrammarFailed, match="complete after 1 tokens, and min_tokens is 3"):
        mask_of(fresh, SeqId(0), asks, (1, 2, a + 1))
    (end,) = text.end_ids
    assert ids(mask_of(fresh, SeqId(0), evolve(asks, params=evolve(asks.params, min_tokens=1)), (1, 2, a + 1))) == [end]
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex"):
        check_form(fresh, Request((1,), SamplingParams(structured_outputs=asked({"regex": "("}))))


def test_few_are_remembered(fresh: Grammars) -> None:
    """The least recently used grammar is forgotten first."""
    g = forgetful(fresh)
    forms = [asked({"regex": f"a{{{i}}}"}) for i in range(1, grammar.KEPT_GRAMMARS + 1)]
    first = compile_grammar(g, forms[0])
    for form in forms[1:]:
        compile_grammar(g, form)
    assert compile_grammar(g, evolve(forms[0])) is first
    compile_grammar(g, asked({"regex": "b"}))
    assert forms[0] in g.compiled
    assert forms[1] not in g.compiled


def test_the_sequences_of_the_last_step_are_remembered(fresh: Grammars) -> None:
    """Of more sequences than can run at once, those whose mask was asked for last are remembered."""
    g = forgetful(fresh, limits=evolve(fresh.limits, max_num_seqs=2))
    for seq in (1, 2, 3, 2, 4):
        allowed(g, seq, asked({"regex": "a"}), ())
    assert list(g.walks) == [2, 4]


def test_choices_are_texts(fresh: Grammars, text: Text) -> None:
    """Choices may hold quotes, backslashes, line ends, slashes and any character: they mean themselves."""
    for words in ('a "b"', "a\\nb", "a\nb\t/", "\u00fc\U0001f600", "/a|b/", "$(a)", "\x00\x7f"):
        output = walk(forgetful(fresh), asked({"choice": [words]}), random.Random(0))
        assert output is not None
        assert decode(text, output) == words


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: (None, limits(text)), "no tokenizer"),
        (lambda text: (text, limits(text, eos_ids=())), "needs an end token"),
    ],
    ids=["text", "end"],
)
def test_what_an_engine_must_have(text: Text, change: Any, says: str) -> None:
    """Without a tokenizer or an end token no output can have a form."""
    with pytest.raises(InvalidRequest, match=says):
        vocabulary_of(Grammars(*change(text)))


def test_tokenizers_that_llguidance_can_not_read(tmp_path: Path) -> None:
    """A tokenizer whose tokens have no bytes of their own is refused, with its folder."""
    text = load_text(toys.folder_of(tmp_path, toys.word_piece()))
    assert text is not None
    with pytest.raises(InvalidRequest, match=f"structured_outputs: .*{tmp_path.name}.*decoder"):
        vocabulary_of(Grammars(text, limits(text, eos_ids=(1,))))


def test_without_llguidance(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed, the error says how to install it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r'pip install "agentinfer\[structured\]"'):
        vocabulary_of(Grammars(text, limits(text)))
