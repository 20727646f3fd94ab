"""Bad words as texts: how they are spelled, and that outputs do not hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import toys
from agentinfer.build import Settings
from agentinfer.errors import InvalidRequest
from agentinfer.loop import Engine, generate, open_engine, stream
from agentinfer.result import spelled
from agentinfer.state.request import Request, SamplingParams
from agentinfer.text import Text, encode, load_text
from tiny import write_tiny


def text_of(folder: Path, tokenizer: Tokenizer) -> Text:
    found = load_text(toys.folder_of(folder, tokenizer))
    assert found is not None
    return found


def spellings(text: Text | None, *words: Any) -> tuple[Any, ...]:
    return spelled(text, Request((1,), SamplingParams(bad_words=words))).params.bad_words


def test_a_word_is_spelled_with_and_without_a_space(tmp_path: Path) -> None:
    """Both count where the tokenizer joins the space to the word, else one covers the other; none is special."""
    text = text_of(tmp_path, toys.byte_level())
    a, space_a = encode(text, "a"), encode(text, " a")
    assert (len(a), len(space_a)) == (1, 1)
    assert spellings(text, "a") == spellings(text, " a") == spellings(text, "  a") == (a, space_a)
    assert spellings(text, "hell") == (encode(text, "hell"),)
    assert len(encode(text, "hell")) == 1
    assert spellings(text, "hello", "a", "hello", (1, 2), "12") == (
        encode(text, "hello"), a, space_a, (1, 2), encode(text, "12")
    )  # fmt: skip
    whole = text_of(tmp_path / "fallback", toys.byte_fallback())
    assert encode(whole, "a")[0] == 1
    assert all(1 not in ids for ids in spellings(whole, "a", "hello"))


def test_a_special_token_in_a_bad_word_is_text(tmp_path: Path) -> None:
    """A literal such as <|im_end|> is spelled letter by letter, as in a prompt."""
    text = text_of(tmp_path, toys.byte_level())
    (ids, *_) = spellings(text, "<|im_end|>")
    assert len(ids) == 10


@pytest.mark.parametrize("word", [" ", "\t\n", "\ud800"])
def test_a_word_that_is_nothing_is_refused_by_name(tmp_path: Path, word: str) -> None:
    """Blank ones would ban spaces by accident, and half a character has no tokens."""
    text = text_of(tmp_path, toys.byte_level())
    with pytest.raises(InvalidRequest) as refusal:
        spellings(text, word)
    assert refusal.value.field == "bad_words"


def test_without_a_tokenizer_a_text_is_refused_and_tokens_are_fine(tmp_path: Path) -> None:
    """The error says what to give instead."""
    engine = open_engine(write_tiny(tmp_path), Settings(num_blocks=16, seed=0))
    wrong, right = generate(engine, [[1], [1]], [SamplingParams(max_tokens=2, bad_words=x) for x in (["a"], [[5]])])
    assert "bad_words: 'a' is text, but there is no tokenizer here; give token ids" in str(wrong.error)
    assert right.error is None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose tokens are the bytes, and some more."""
    place = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=280, eos_token_id=270)
    return open_engine(toys.folder_of(place, toys.byte_level()), Settings(block_size=4, num_blocks=80, seed=0))


def test_no_output_holds_a_bad_word(engine: Engine) -> None:
    """Words of one token and of several, of letters that are all that may be said: none is in any text, though each is
    said where it is allowed.
    """
    letters = sorted({*b"helo 12", *encode(engine.text, "hell"), *encode(engine.text, "12")})
    words = ("el", "lo", "o h", "2", "12")
    free = SamplingParams(max_tokens=60, seed=1, allowed_token_ids=letters, temperature=5.0)
    before = [r.text for r in generate(engine, [[1], [2], [3]], free)]
    assert all(any(word in str(text) for text in before) for word in ("el", "lo", "2"))
    banned = SamplingParams(max_tokens=60, seed=1, allowed_token_ids=letters, temperature=5.0, bad_words=words)
    results = generate(engine, [[1], [2], [3]], banned)
    for word in words:
        spelled_out = encode(engine.text, word)
        for result in results:
            ids = result.output_ids
            assert all(ids[i : i + len(spelled_out)] != spelled_out for i in range(len(ids)))
    (alone,) = [delta.result for delta in stream(engine, [2], banned) if delta.result is not None]
    assert alone.output_ids == results[1].output_ids


def test_what_is_asked_is_in_the_engine_as_tokens(engine: Engine) -> None:
    """A trace needs no tokenizer: the request that waits has token ids."""
    seq = engine.add(Request((1,), SamplingParams(max_tokens=2, bad_words="a")))
    waiting = next(iter(engine.world.state.waiting))
    assert waiting.seq == seq
    assert waiting.request.params.bad_words == (encode(engine.text, "a"), encode(engine.text, " a"))
    engine.abort(seq)
    while engine.unfinished:
        engine.step()
