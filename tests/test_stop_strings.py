"""Stop strings: found in the text wherever tokens begin and end, trimmed exactly, and the sequence ended there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import toys
from agentinfer.build import Settings
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, generate, open_engine, run, stream
from agentinfer.result import Reader, Result, read, read_end
from agentinfer.state.check import violations
from agentinfer.state.engine import EngineState, digest
from agentinfer.state.event import Event, Stopped
from agentinfer.state.history import rewind
from agentinfer.state.policy import Turn
from agentinfer.state.request import Request, SamplingParams
from agentinfer.state.sequence import Finished
from agentinfer.state.trace import Trace, verify
from agentinfer.text import Text, decode, load_text, new_decoder
from test_ranks import SETTINGS, threads, together
from tiny import write_tiny

PROMPT = [5, 6, 7]
PLAIN = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A byte-level toy."""
    found = load_text(toys.folder_of(tmp_path_factory.mktemp("text"), toys.byte_level()))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are the bytes, and some more."""
    place = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=280, eos_token_id=270)
    return toys.folder_of(place, toys.byte_level())


def opened(folder: Path, **changes: Any) -> Engine:
    """A small engine."""
    return open_engine(folder, Settings(block_size=4, num_blocks=80, max_num_seqs=8, seed=0, **changes))


def pieces_of(text: Text, reader: Reader, ids: list[int], cuts: list[int]) -> tuple[Reader, list[str]]:
    """The pieces when *ids* come in chunks that end at *cuts*, and the end."""
    pieces, at = list[str](), 0
    for cut in [*sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]:
        reader, piece = read(text, reader, ids[at:cut])
        pieces.append(piece)
        at = cut
    return reader, [*pieces, read_end(text, reader)]


# --- the reader -----------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_join_to_the_text_before_the_stop(text: Text, data: st.DataObject) -> None:
    """However the tokens come, what is shown is the text up to the first stop string, and nothing after it is read."""
    ids = data.draw(st.lists(st.sampled_from([*b"ab \xc3\xa9\xf0\x9f", *range(256, 267)]), max_size=20))
    stop = tuple(data.draw(st.lists(st.text("ab e12hl\u00e9\ufffd", min_size=1, max_size=3), min_size=1, max_size=3)))
    include = data.draw(st.booleans())
    reader, pieces = pieces_of(
        text, Reader(stop=stop, include_stop_str_in_output=include), ids, data.draw(st.lists(st.integers(0, 20)))
    )
    full = decode(text, ids)
    if reader.found is None:
        assert "".join(pieces) == full
        return
    shown = "".join(pieces)
    assert not any(s in (shown.removesuffix(reader.found) if include else shown) for s in stop if s == reader.found)
    assert full.startswith(shown if include else shown + reader.found)
    before, _ = pieces_of(text, Reader(stop=stop), ids[: reader.count - 1], [])
    assert before.found is None  # the last token that was read completed it


def test_a_stop_string_over_token_boundaries(text: Text) -> None:
    """`b cd` in a|b| |c|de: a is shown at once, b only once it is no stop string, and e never."""
    (de,) = [text.tokenizer.token_to_id("he")]
    reader, got = Reader(stop=("b ch",)), list[str]()
    for token in [*b"ab x", *b"b c", de, *b"zz"]:
        reader, piece = read(text, reader, (token,))
        got.append(piece)
    assert got == ["a", "", "", "b x", "", "", "", "", "", ""]
    assert (reader.found, reader.count, read_end(text, reader)) == ("b ch", 8, "")
    _, shown = read(text, Reader(stop=("b ch",), include_stop_str_in_output=True), [*b"ab c", de])
    assert shown == "ab ch"


def test_a_special_token_stops_even_where_it_is_skipped(text: Text) -> None:
    """STR-03: stop=["<|im_end|>"] with skip_special_tokens."""
    end = text.tokenizer.token_to_id("<|im_end|>")
    for skip in (True, False):
        reader = Reader(new_decoder(skip_special_tokens=skip), stop=("<|im_end|>",))
        reader, shown = read(text, reader, [*b"ab", end, *b"cd"])
        assert (shown, reader.found, reader.count) == ("ab", "<|im_end|>", 3)


def test_what_is_held_comes_at_the_end(text: Text) -> None:
    """The beginning of a stop string that never came is part of the text, and so is a character that was cut off."""
    reader, shown = read(text, Reader(stop=("abc",)), [*b"xab", 0xC3])
    assert (shown, read_end(text, reader)) == ("x", "ab\ufffd")


def test_min_tokens_come_first(text: Text) -> None:
    """A stop string counts where it ends after the first min_tokens, even if it begins within them."""
    reader, shown = read(text, Reader(stop=("ab",), min_tokens=3), [*b"ababxab"])
    assert (shown, reader.count) == ("ab", 4)
    reader, shown = read(text, Reader(stop=("ab",), min_tokens=2), [*b"abab"])
    assert (shown, reader.count) == ("ab", 4)
    reader, shown = read(text, Reader(stop=("ab",), min_tokens=1), [*b"abab"])
    assert (shown, reader.count) == ("", 2)


def test_spaces_between_special_tokens(tmp_path: Path) -> None:
    """A tokenizer that puts spaces between tokens does not put them between special ones if so asked."""
    tokenizer = toys.word_piece()
    tokenizer.add_special_tokens(["<x>", "<y>"])
    text = load_text(toys.folder_of(tmp_path, tokenizer))
    assert text is not None
    x, y = (tokenizer.token_to_id(t) for t in ("<x>", "<y>"))
    word = tokenizer.get_vocab_size(with_added_tokens=False) - 1
    for spaces, want in ((True, "<x> <y> "), (False, "<x><y> ")):
        decoder = new_decoder(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        _, shown = read(text, Reader(decoder), [x, y, word])
        assert shown.startswith(want)


# --- the engine -----------------------------------------------------------------------------------------------------


def some_stop(engine: Engine) -> tuple[Result, str]:
    """A plain result, and two characters in the middle of its text."""
    (full,) = generate(engine, [PROMPT], PLAIN)
    assert full.text is not None
    return full, full.text[len(full.text) // 2 :][:2]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_an_output_ends_at_its_stop_string(folder: Path, *, overlap: bool, include: bool) -> None:
    """Text and tokens end there, in streams and wholes; at most one step is wasted; the blocks come back."""
    engine = opened(folder, overlap=overlap)
    full, stop = some_stop(engine)
    params = evolve(PLAIN, stop=(stop, "never"), include_stop_str_in_output=include)
    first = engine.world.state.step
    (got,) = generate(engine, [PROMPT], params)
    last = engine.world.state.step
    assert full.text is not None
    assert got.text == full.text[: full.text.index(stop)] + (stop if include else "")
    assert (got.finish_reason, got.stop_reason, got.error) == ("stop", stop, None)
    assert got.output_ids == full.output_ids[: len(got.output_ids)]
    assert len(got.output_ids) < len(full.output_ids)
    assert last - first <= len(got.output_ids) + 1
    deltas = list(stream(engine, PROMPT, params))
    assert "".join(delta.text for delta in deltas) == got.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == got.output_ids
    assert deltas[-1].result is not None
    assert evolve(deltas[-1].result, cached_tokens=got.cached_tokens) == got
    assert engine.readers == {}
    assert violations(engine.world.state) == []
    assert engine.world.state.pool.num_available == engine.machine.limits.num_blocks


def test_others_in_the_batch_are_not_touched(folder: Path) -> None:
    """A stop string ends its own request alone, and the others get the tokens that they would have got."""
    engine = opened(folder)
    full, stop = some_stop(engine)
    prompts = [PROMPT, PROMPT, [9, 9]]
    alone = generate(engine, [[9, 9]], PLAIN)[0]
    results = generate(engine, prompts, [PLAIN, evolve(PLAIN, stop=stop), PLAIN])
    assert [r.output_ids for r in results[::2]] == [full.output_ids, alone.output_ids]
    assert len(results[1].output_ids) < len(full.output_ids)


def test_a_stop_string_in_the_last_token_is_a_stop(folder: Path) -> None:
    """Where max_tokens ends the output in the very token that completes the stop string, the reason is stop."""
    engine = opened(folder)
    _, stop = some_stop(engine)
    (got,) = generate(engine, [PROMPT], evolve(PLAIN, stop=stop))
    (same,) = generate(engine, [PROMPT], evolve(PLAIN, stop=stop, max_tokens=len(got.output_ids)))
    assert evolve(same, cached_tokens=got.cached_tokens) == got


def test_a_trace_with_stops_replays(folder: Path) -> None:
    """The end is an event: the control plane lives through it again without any text."""
    events, digests = list[Event](), list[str]()

    def note(event: Event, state: EngineState) -> None:
        events.append(event)
        digests.append(digest(state))

    engine = opened(folder)
    _, stop = some_stop(engine)
    engine = open_engine(folder, Settings(block_size=4, num_blocks=80, max_num_seqs=8, seed=0), note=note)
    (got,) = generate(engine, [PROMPT], evolve(PLAIN, stop=stop))
    assert [e for e in events if isinstance(e, Stopped)] == [Stopped(0, len(got.output_ids), stop)]
    assert verify(Trace(engine.machine.limits, "throughput", tuple(events), tuple(digests))) is None


def test_forks_and_rewound_sequences_go_on_looking(folder: Path) -> None:
    """The reader is a value: a child goes on with its parent's, and one that waits again is read again."""
    engine = opened(folder)
    full, stop = some_stop(engine)
    (want,) = generate(engine, [PROMPT], evolve(PLAIN, stop=stop))
    parent = engine.add(Request(PROMPT, evolve(PLAIN, stop=stop)))
    for _ in range(len(want.output_ids) - 2):
        engine.step()
    (child,) = engine.fork(parent)
    old = engine.world.state
    both = {done.seq: done for done in run(engine, [parent, child])}
    assert [both[seq].output for seq in (parent, child)] == [want.output_ids] * 2
    assert {done.reason for done in both.values()} == {"stop"}
    engine.reset(rewind(old, engine.world.state))
    again = {done.seq: done for done in run(engine, [parent, child])}
    assert [again[seq].output for seq in (parent, child)] == [want.output_ids] * 2
    assert len(full.output_ids) > len(want.output_ids)


def test_a_stop_token_is_told_and_shown_if_asked(folder: Path) -> None:
    """SMP-11: stop_reason names the id; include_stop_str_in_output shows its text."""
    engine = opened(folder)
    full, _ = some_stop(engine)
    token = full.output_ids[7]
    assert engine.text is not None
    for include in (False, True):
        params = evolve(PLAIN, stop_token_ids=(token,), include_stop_str_in_output=include)
        (got,) = generate(engine, [PROMPT], params)
        at = full.output_ids.index(token)
        assert (got.finish_reason, got.stop_reason) == ("stop", token)
        assert got.text == decode(engine.text, full.output_ids[: at + include])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_token_that_ends_the_output_is_why_whatever_its_text(tmp_path: Path, *, skip: bool, include: bool) -> None:
    """An end token whose text is a stop string, too: stop_reason is its id, as without stop strings; where ends are
    ignored, the stop string is what is left.
    """
    end = toys.byte_level().token_to_id("<|im_end|>")
    assert end is not None
    engine = opened(toys.folder_of(write_tiny(tmp_path, vocab_size=280, eos_token_id=end), toys.byte_level()))
    params = SamplingParams(
        max_tokens=3, temperature=0.0, logit_bias={end: 100}, stop="<|im_end|>", skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )  # fmt: skip
    for asked, why in ((params, end), (evolve(params, ignore_eos=True), "<|im_end|>")):
        (got,) = generate(engine, [PROMPT], asked)
        (*_, last) = stream(engine, PROMPT, asked)
        assert (got.output_ids, got.finish_reason, got.stop_reason) == ((end,), "stop", why)
        assert got.text == "<|im_end|>" * include
        assert last.completion == got.outputs[0]


def test_stop_needs_a_tokenizer(tmp_path: Path) -> None:
    """A model that speaks in token ids alone refuses stop strings by name."""
    engine = opened(write_tiny(tmp_path))
    (got,) = generate(engine, [PROMPT], SamplingParams(stop="x"))
    assert got.finish_reason == "rejected"
    with pytest.raises(InvalidRequest, match="stop: is text"):
        engine.add(Request(PROMPT, SamplingParams(stop="x")))


@pytest.mark.parametrize("bad", ["", [""], [1], 5, None, ["a", b"b"]])
def test_bad_stops_are_refused(bad: Any) -> None:
    """Only texts that are not empty."""
    with pytest.raises(InvalidRequest, match=r"^stop: "):
        SamplingParams(stop=bad)
    assert SamplingParams(stop="ab") == SamplingParams(stop=["ab"])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_policy_that_raises_moves_no_reader_twice(folder: Path, *, overlap: bool) -> None:
    """Wherever a step is undone and planned again, the output still ends at its stop string, token for token."""
    engine = opened(folder, overlap=overlap)
    full, stop = some_stop(engine)
    assert full.text is not None
    (want,) = generate(engine, [PROMPT], evolve(PLAIN, stop=stop))
    policy, calls = engine.machine.policy, itertools.count()

    def flaky(state: EngineState) -> Iterable[Turn]:
        if next(calls) % 3:
            raise ValueError("not now")
        return policy(state)

    engine.machine = evolve(engine.machine, policy=flaky)
    seq, tokens, ends = engine.add(Request(PROMPT, evolve(PLAIN, stop=stop))), list[int](), list[Finished]()
    while engine.unfinished:
        try:
            output = engine.step()
        except ValueError:
            continue
        if output is not None:
            tokens += output.tokens.tolist()
            ends += output.finished
    (done,) = ends
    assert (done.seq, done.reason, done.matched, done.output) == (seq, "stop", stop, want.output_ids)
    assert tuple(tokens) == want.output_ids
    assert engine.readers == {}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_string_ends_the_sequence_on_every_rank(folder: Path, *, overlap: bool) -> None:
    """Only rank 0 reads text; the others hear of the end as an event, and come to the same state."""
    full, stop = some_stop(opened(folder))
    how = [evolve(PLAIN, stop=stop), PLAIN]
    want = generate(opened(folder), [PROMPT, [9, 9]], how)

    def drive(engine: Engine) -> list[Result]:
        engine.text = load_text(folder)
        return generate(engine, [PROMPT, [9, 9]], how)

    found, _ = together(folder, 2, threads, drive, evolve(SETTINGS, overlap=overlap))
    for got, right in zip(found, want, strict=True):
        assert (got.output_ids, got.text, got.stop_reason) == (right.output_ids, right.text, right.stop_reason)
    assert len(want[0].output_ids) < len(full.output_ids)
