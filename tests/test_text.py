"""Text: what is encoded, rendered and decoded, against the tokenizers package and transformers."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer

import toys
from agentinfer.errors import CheckpointError, InvalidRequest
from agentinfer.text import (
    Text,
    Utf8,
    chat,
    decode,
    encode,
    eos_union,
    feed,
    feed_utf8,
    flush_text,
    flush_utf8,
    load_text,
    new_decoder,
)

# Byte tokens, and what must come out after each, the flush last.
UTF8_CASES = {
    "emoji in four": (["f0", "9f", "98", "80"], ["", "", "", "\U0001f600", ""]),
    "emoji in two": (["20f09f", "9880", "21"], [" ", "\U0001f600", "!", ""]),
    "cjk ends inside a token": (["4120e4b8", "9661", "62"], ["A ", "\u4e16a", "b", ""]),
    "two characters share a token": (["e4b896e7", "958c"], ["\u4e16", "\u754c", ""]),
    "zwj family": (["f09f91a9", "e280", "8d", "f09f91", "a7"], ["\U0001f469", "", "\u200d", "", "\U0001f467", ""]),
    "invalid lead": (["6f6bff", "78"], ["ok\ufffd", "x", ""]),
    "cut off, then good": (["e4b8", "5a"], ["", "\ufffdZ", ""]),
    "cut off at the end": (["6869", "f09f98"], ["hi", "", "\ufffd"]),
}
EXACT = {
    "byte_level": toys.byte_level((b" \xf0\x9f", b"\x98\x80", b"A \xe4\xb8", b"\x96a", b"\xff\xfe")),
    "byte_level_fuse": toys.byte_level(),
    "metaspace": toys.metaspace(),
    "word_piece": toys.word_piece(),
    "end_of_word": toys.end_of_word(),
    "words": toys.words(),
}
EXACT["byte_level_fuse"].decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
FALLBACK = toys.byte_fallback()
ODD_TEXTS = (
    "a    b",
    " hello",
    "x.\n\n y",
    "<|im_end|>",
    "he<|im_end|>ll",
    "  ",
    "h\u00e9l\u4e16\U0001f600",
    "</s>a <s> a",
)
# Bytes that are often the beginning, middle and end of a character, well formed or not.
NEAR_BYTES = st.sampled_from([0x20, 0x41, 0x80, 0x8D, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF])


def text_of(tmp_path: Path, tokenizer: Tokenizer, template: str | None = None, **config: Any) -> Text:
    """What is loaded from a folder with *tokenizer* in it."""
    text = load_text(toys.folder_of(tmp_path, tokenizer, template, **config))
    assert text is not None
    return text


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    """Toy tokenizers whose decoding any chunking must match exactly, loaded."""
    return {name: text_of(tmp_path_factory.mktemp(name), tokenizer) for name, tokenizer in EXACT.items()}


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The toy with byte tokens among pieces, loaded."""
    return text_of(tmp_path_factory.mktemp("fallback"), FALLBACK, bos_token="<s>", eos_token="</s>")  # noqa: S106


def pieces_of(text: Text, ids: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    """The deltas when *ids* arrive in chunks that end at *cuts*, and the flush."""
    decoder, pieces = new_decoder(skip_special_tokens=skip), list[str]()
    bounds = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    for first, end in itertools.pairwise(bounds):
        decoder, piece = feed(text, decoder, ids[first:end])
        assert len(decoder.utf8.held) <= 3
        pieces.append(piece)
    return [*pieces, flush_text(text, decoder)]


# --- bytes to characters ---


@pytest.mark.parametrize("name", UTF8_CASES)
def test_utf8_chunks(name: str) -> None:
    """Each token gives exactly the characters that it completes, bad bytes at once, a cut-off end at the flush."""
    tokens, want = UTF8_CASES[name]
    state, got = Utf8(), list[str]()
    for token in tokens:
        state, piece = feed_utf8(state, bytes.fromhex(token))
        got.append(piece)
    assert [*got, flush_utf8(state)] == want


@given(
    st.lists(st.one_of(NEAR_BYTES, st.integers(0, 255)), max_size=24).map(bytes),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_utf8_any_bytes_any_chunks(data: bytes, cuts: list[int]) -> None:
    """Joined pieces are the decoding of all bytes with replacement, no more than three bytes are ever held."""
    bounds = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    for each_byte, errors in ((False, "replace"), (True, "surrogateescape")):
        state, joined = Utf8(), ""
        for first, end in itertools.pairwise(bounds):
            state, piece = feed_utf8(state, data[first:end], each_byte=each_byte)
            joined += piece
            assert len(state.held) <= 3
        joined += flush_utf8(state, each_byte=each_byte)
        want = data.decode("utf-8", errors)
        assert joined == "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in want)


def test_utf8_holds_only_what_can_become_a_character() -> None:
    """Bytes are held if and only if some continuation makes them a character; ill-formed ones are given up at once."""
    chars = (chr(c).encode() for c in range(0, 0x110000, 0x40) if not 0xD800 <= c < 0xE000)
    begun = {char[:n] for char in chars for n in range(1, len(char))}
    assert all(feed_utf8(Utf8(), data) == (Utf8(data), "") and flush_utf8(Utf8(data)) == "\ufffd" for data in begun)
    for data in (bytes(b) for n in (1, 2) for b in itertools.product(range(256), repeat=n)):
        held = feed_utf8(Utf8(), data)[0].held
        assert held == next((data[i:] for i in range(len(data)) if data[i:] in begun), b"")


def test_utf8_state_is_a_value() -> None:
    """Going on from an older state is not disturbed by what was fed since."""
    start, _ = feed_utf8(Utf8(), b"\xe4\xb8")
    assert feed_utf8(start, b"\x96")[1] == "\u4e16"
    assert feed_utf8(start, b"\xad")[1] == "\u4e2d"


# --- tokens to text ---


@pytest.mark.parametrize("name", UTF8_CASES)
def test_byte_level_chunks(name: str, tmp_path: Path) -> None:
    """A byte-level tokenizer gives the same chunks as its bytes."""
    tokens, want = UTF8_CASES[name]
    tokenizer = toys.byte_level(tuple(bytes.fromhex(t) for t in tokens))
    text = text_of(tmp_path, tokenizer)
    ids = [tokenizer.token_to_id(toys.byte_token(bytes.fromhex(t))) for t in tokens]
    assert pieces_of(text, ids, list(range(len(ids))), skip=True) == want


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_deltas_join_to_decode(name: str, exact: dict[str, Text], data: st.DataObject) -> None:
    """For any ids (unknown ones too) in any chunks, the joined deltas are what the tokenizer decodes at once."""
    text, size = exact[name], EXACT[name].get_vocab_size()
    added = st.sampled_from(sorted(EXACT[name].get_added_tokens_decoder()) or [0])
    ids = data.draw(
        st.lists(st.one_of(st.integers(0, size + 2), st.integers(max(0, size - 12), size), added), max_size=20)
    )
    cuts, skip = data.draw(st.lists(st.integers(0, 20), max_size=20)), data.draw(st.booleans())
    want = EXACT[name].decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(text, ids, cuts, skip=skip)) == want
    assert decode(text, ids, skip_special_tokens=skip) == want


@given(data=st.data())
def test_byte_fallback_joins_to_decode(fallback: Text, data: st.DataObject) -> None:
    """With byte tokens among pieces, whole and cut-off characters decode as by the tokenizer, in any chunks."""
    char = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \u2581a\u4e16\U0001f600")).map(
        _byte_ids
    )
    lone = st.sampled_from(["\u4e16", "\U0001f600", "\u00e9"]).map(lambda c: _byte_ids(c)[:-1])
    piece = st.integers(259, FALLBACK.get_vocab_size() - 1).map(lambda i: [i])
    special = st.sampled_from([[1], [2], [FALLBACK.get_vocab_size() + 1]])
    # A cut-off character is followed by a piece, so that it is a run of its own.
    part = st.one_of(char, piece, special, st.tuples(piece, lone, piece).map(lambda t: t[0] + t[1] + t[2]))
    ids = [i for p in data.draw(st.lists(part, max_size=10)) for i in p]
    cuts, skip = data.draw(st.lists(st.integers(0, 30), max_size=20)), data.draw(st.booleans())
    assert "".join(pieces_of(fallback, ids, cuts, skip=skip)) == FALLBACK.decode(ids, skip_special_tokens=skip)


def _byte_ids(words: str) -> list[int]:
    return [FALLBACK.token_to_id(f"<0x{b:02X}>") for b in words.encode()]


@pytest.mark.parametrize(
    "ids", [[3 + 0x20], [3 + 0x20, 3 + 0x20], [259, 259, 260], [3 + 0xE4, 3 + 0xB8], [3 + 0xFF, 260], [2, 263]]
)
def test_byte_fallback_at_the_start(fallback: Text, ids: list[int]) -> None:
    """The one space that the decoder strips at the start is stripped however it was written, and no other."""
    for cuts in ([], list(range(9))):
        assert "".join(pieces_of(fallback, ids, cuts, skip=True)) == FALLBACK.decode(ids)


def test_byte_fallback_keeps_good_characters_beside_bad_bytes(fallback: Text) -> None:
    """In a run of byte tokens a bad byte costs itself alone, whatever the chunks: the documented exception."""
    ids = [*_byte_ids("\u4e16"), 3 + 0xFF, *_byte_ids("\u754c")]
    assert decode(fallback, ids) == "\u4e16\ufffd\u754c"
    assert pieces_of(fallback, ids, list(range(9)), skip=True) == ["", "", "\u4e16", "\ufffd", "", "", "\u754c", ""]
    assert FALLBACK.decode(ids) == "\ufffd" * 7


@pytest.mark.parametrize("words", ODD_TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_odd_texts(words: str, skip: bool, exact: dict[str, Text], fallback: Text) -> None:
    """Leading and repeated spaces, newlines and special tokens come out token by token as they do at once."""
    for text in (exact["byte_level"], exact["metaspace"], fallback):
        ids = list(encode(text, words))
        want = text.tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces_of(text, ids, list(range(len(ids))), skip=skip)) == want


def test_first_delta_keeps_its_space(exact: dict[str, Text]) -> None:
    """A byte-level output that begins with a space says so in its first delta."""
    text = exact["byte_level"]
    assert feed(text, new_decoder(), encode(text, " a")[:1])[1] == " a"


def test_skipped_tokens_are_empty_deltas(exact: dict[str, Text]) -> None:
    """A skipped special token gives an empty delta, and does not disturb a character that it interrupts."""
    text = exact["byte_level"]
    end = text.tokenizer.token_to_id("<|im_end|>")
    ids = [0xE4, 0xB8, end, 0x96]
    tokens = [text.tokenizer.token_to_id(toys.byte_token(bytes([b]))) if b != end else end for b in ids]
    assert pieces_of(text, tokens, [1, 2, 3], skip=True) == ["", "", "", "\u4e16", ""]


def test_time_is_linear(exact: dict[str, Text], fallback: Text) -> None:
    """The state carries nothing of the output so far beyond one token and three bytes, so no step re-decodes it."""
    for text in (exact["byte_level"], fallback):
        decoder, _ = feed(text, new_decoder(), [40] * 5000)
        assert len(decoder.before) <= 1
        assert len(decoder.utf8.held) <= 3


# --- loading ---


def test_encodes_as_transformers_does(tmp_path: Path) -> None:
    """Ids, added special tokens included, are those of AutoTokenizer on the same folder."""
    for name, tokenizer in (("a", toys.byte_level()), ("b", toys.byte_fallback()), ("c", toys.metaspace())):
        text = text_of(tmp_path / name, tokenizer, eos_token="</s>" if name != "a" else "<|im_end|>")
        other = AutoTokenizer.from_pretrained(tmp_path / name)
        for words in ODD_TEXTS:
            assert list(encode(text, words, parse_special_tokens=True)) == other(words).input_ids
            assert list(encode(text, words)) == other(words, split_special_tokens=True).input_ids
    assert encode(text_of(tmp_path / "d", toys.byte_fallback()), "a")[:1] == (1,)


def test_special_tokens_of_a_prompt_are_text_unless_asked_otherwise(tmp_path: Path) -> None:
    """API-07: `<|im_end|>` in a prompt is ten bytes, but one token where a template wrote it; added ones still come."""
    text = text_of(tmp_path / "a", toys.byte_level())
    end = text.tokenizer.token_to_id("<|im_end|>")
    assert encode(text, "a<|im_end|>b") == tuple(b"a<|im_end|>b")
    assert encode(text, "a<|im_end|>b", parse_special_tokens=True) == (97, end, 98)
    assert encode(text, "a<think>") == (97, text.tokenizer.token_to_id("<think>"))  # none of the special ones
    other = text_of(tmp_path / "b", toys.byte_fallback(), bos_token="<s>")  # noqa: S106
    ids = encode(other, "<s>a")
    assert ids[0] == 1
    assert 1 not in ids[1:]
    assert encode(other, "<s>a", add_special_tokens=False) == ids[1:]
    assert encode(other, "<s>a", parse_special_tokens=True)[:2] == (1, 1)


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """A tokenizer.json that was saved with truncation and padding cuts and pads nothing."""
    tokenizer = toys.byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    text = text_of(tmp_path, tokenizer)
    assert len(encode(text, "abcdefg")) == 7
    assert len(encode(text, "a")) == 1


def test_no_tokenizer_gives_none(tmp_path: Path) -> None:
    """A folder without any tokenizer file is a model that works with ids alone."""
    (tmp_path / "config.json").write_text("{}")
    assert load_text(tmp_path) is None


def test_tokenizer_config_alone_is_an_error(tmp_path: Path) -> None:
    """A tokenizer_config.json without a vocabulary is an incomplete download, and said to be."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing.*incomplete"):
        load_text(tmp_path)


def test_vocabulary_without_tokenizer_json(tmp_path: Path) -> None:
    """A folder with vocab.json and merges.txt is converted, and encodes as AutoTokenizer does."""
    vocab = {toys.byte_token(bytes([b])): b for b in range(256)} | {"he": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}'
    )
    text = load_text(tmp_path)
    assert text is not None
    assert list(encode(text, "hehe 12")) == AutoTokenizer.from_pretrained(tmp_path)("hehe 12").input_ids
    assert decode(text, encode(text, "hehe \u4e16")) == "hehe \u4e16"
    assert text.end_ids == (257,)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """A tokenizer that needs code of the checkpoint is refused; the code is not run."""
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_text(tmp_path)
    assert not (tmp_path / "ran").exists()


BAD_FILES = {
    "not json": ("tokenizer.json", "{", r"tokenizer\.json"),
    "no tokenizer": ("tokenizer.json", "{}", r"tokenizer\.json"),
    "config no object": ("tokenizer_config.json", "[]", r"tokenizer_config\.json"),
    "template of a wrong kind": (
        "tokenizer_config.json",
        '{"chat_template": 5}',
        r"tokenizer_config\.json.*chat_template",
    ),
    "template syntax": ("chat_template.jinja", "{% if %}", r"chat_template\.jinja.*line 1"),
    "template encoding": ("chat_template.jinja", b"\xff", r"chat_template\.jinja"),
    "added token id": (
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"7000": {"content": "<new>", "special": true}}}',
        "added_tokens_decoder.*<new>.*7000",
    ),
    "added token shape": ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "added_tokens_decoder"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named(name: str, tmp_path: Path) -> None:
    """A file that can not be used is refused by name."""
    file, content, match = BAD_FILES[name]
    toys.folder_of(tmp_path, toys.byte_level())
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=match):
        load_text(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_links_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    """A link that leaves the model folder is refused, and its target is never opened."""
    folder = toys.folder_of(tmp_path / "model", toys.byte_level())
    outside = tmp_path / f"outside-{name}"
    outside.write_text((folder / name).read_text() if (folder / name).exists() else "{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    opened = _opened_while(folder)
    assert "CheckpointError" in opened
    assert str(outside) not in opened


def _opened_while(folder: Path) -> str:
    """What load_text raises on *folder*, and all files it opens, in a process of its own (an audit hook stays)."""
    code = (
        "import sys, pathlib; from agentinfer.text import load_text; seen = []\n"
        "sys.addaudithook(lambda e, a: seen.append(str(a[0])) if e == 'open' else None)\n"
        "try: load_text(pathlib.Path(sys.argv[1]))\n"
        "except Exception as e: print(type(e).__name__)\n"
        "print(*seen, sep='\\n')"
    )
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    """The layout of the hub cache, links from a snapshot to its blobs, works."""
    made = toys.folder_of(tmp_path / "made", toys.byte_level(), toys.CHATML)
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(made.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(blobs / str(i))
    text = load_text(snapshot)
    assert text is not None
    assert text.templates.compiled


def test_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json declares are encoded, skipped and named, as transformers does."""
    tokenizer = toys.byte_level()
    size = tokenizer.get_vocab_size()
    declared = {
        str(size): {"content": "<new>", "special": True},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    text = text_of(
        tmp_path, tokenizer, added_tokens_decoder=declared, eos_token={"__type": "AddedToken", "content": "<new>"}
    )
    assert encode(text, "<new><plain>", parse_special_tokens=True) == (size, size + 1)
    assert AutoTokenizer.from_pretrained(tmp_path)("<new><plain>").input_ids == [size, size + 1]
    assert decode(text, (size, size + 1)) == "<plain>"
    assert text.end_ids == (size,)


def test_importing_text_imports_nothing_heavy(tmp_path: Path) -> None:
    """Loading, encoding, rendering and decoding need neither torch nor transformers."""
    toys.folder_of(tmp_path, toys.byte_level(), toys.CHATML)
    code = (
        "import sys, pathlib; from agentinfer.text import *\n"
        "import agentinfer.text as t; assert 'tokenizers' not in sys.modules and 'jinja2' not in sys.modules\n"
        "x = t.load_text(pathlib.Path(sys.argv[1])); ids = t.chat(x, [{'role': 'user', 'content': 'he'}])\n"
        "t.decode(x, ids)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


# --- encode and end tokens ---


@pytest.mark.parametrize("prompt", [5, None, b"a", "a\ud800b"])
def test_bad_prompts(prompt: Any, exact: dict[str, Text]) -> None:
    """What is no text, or no valid Unicode, is refused naming the prompt."""
    with pytest.raises(InvalidRequest, match="prompt: ") as caught:
        encode(exact["byte_level"], prompt)
    assert caught.value.field == "prompt"


def test_other_threads_go_on_while_a_long_prompt_is_encoded(exact: dict[str, Text]) -> None:
    """A server's event loop lives beside it: nobody waits for the whole of it."""
    text = next(iter(exact.values()))
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        job = pool.submit(encode, text, "ab " * 400_000)
        last, longest = began, 0.0
        while not job.done():
            time.sleep(0.001)
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
        assert longest < (time.perf_counter() - began) / 2


def test_empty_prompt_has_no_ids(exact: dict[str, Text]) -> None:
    """The empty text gives no ids where the tokenizer adds none."""
    assert encode(exact["byte_level"], "") == ()


def test_end_tokens(tmp_path: Path) -> None:
    """The stop set is the model's own ids, the tokenizer's end token and the turn ends that the template writes."""
    chatml = text_of(tmp_path / "a", toys.byte_level(), toys.CHATML, eos_token="<\uff5cend\u2581of\uff5c>")  # noqa: S106
    end, other = chatml.tokenizer.token_to_id("<|im_end|>"), chatml.tokenizer.token_to_id("<\uff5cend\u2581of\uff5c>")
    assert eos_union((90, 91), chatml) == (90, 91, end, other)
    assert eos_union((90,), text_of(tmp_path / "b", toys.byte_level())) == (90,)
    assert eos_union((), text_of(tmp_path / "c", toys.byte_level(), eos_token="<|im_end|>")) == (end,)  # noqa: S106
    assert eos_union((91, 90, 91), None) == (90, 91)
    # A template may name tokens that this vocabulary lacks.
    assert text_of(tmp_path / "d", toys.byte_level(), "{{ '<|eot_id|>' }}").end_ids == ()


# --- chat ---

TALK = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "he<|im_end|>ll"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("talk", [TALK, TALK[1:2], TALK[1:]])
def test_chat_is_apply_chat_template(add: bool, talk: list[dict[str, str]], tmp_path: Path) -> None:
    """The ids of a conversation are those of apply_chat_template, special literals of the user included."""
    text = text_of(tmp_path, toys.byte_level(), toys.CHATML, eos_token="<|im_end|>")  # noqa: S106
    other = AutoTokenizer.from_pretrained(tmp_path)
    want = other.apply_chat_template(talk, add_generation_prompt=add, tokenize=True, return_dict=False)
    assert list(chat(text, talk, add_generation_prompt=add)) == want


QWEN_LIKE = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- endif %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system or '') + '\\n<tools>' }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("system", [True, False])
def test_tools_and_switches_reach_the_template(tmp_path: Path, variables: dict[str, Any], *, system: bool) -> None:
    """API-07: tools, calls, their results, system and enable_thinking give the ids of apply_chat_template."""
    text = text_of(tmp_path, toys.byte_level(), QWEN_LIKE, eos_token="<|im_end|>")  # noqa: S106
    other = AutoTokenizer.from_pretrained(tmp_path)
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "K\u00f6ln <b>"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no"},
    ]
    talk = [{"role": "system", "content": "be brief"}, *talk] if system else talk
    for offered in (tools, None):
        want = other.apply_chat_template(
            talk, tools=offered, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
        )
        assert list(chat(text, talk, tools=offered, **variables)) == want


def test_chat_has_one_bos(tmp_path: Path) -> None:
    """A template that writes BOS, with a tokenizer that adds one, gives one; variables reach the template."""
    text = text_of(tmp_path, toys.byte_fallback(), toys.WITH_BOS, bos_token="<s>")  # noqa: S106
    ids = chat(text, [{"role": "user", "content": "a"}])
    assert ids.count(1) == 1
    assert ids[0] == 1
    thinking = text.tokenizer.token_to_id("<think>")
    assert thinking not in ids
    assert thinking in chat(text, [{"role": "user", "content": "a"}], enable_thinking=False)


def test_parts_are_joined(tmp_path: Path) -> None:
    """Text parts are the same as their texts joined by newlines; an assistant with tool calls needs no content."""
    text = text_of(tmp_path, toys.byte_level(), "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert decode(text, chat(text, [{"role": "user", "content": parts}])) == "user:a\nb;"
    assert decode(text, chat(text, [{"role": "assistant", "content": None, "tool_calls": [{}]}])) == "assistant:;"


def test_template_environment(tmp_path: Path) -> None:
    """Templates find what they expect: tojson unescaped, loop controls, generation marks, blocks trimmed, the time."""
    source = (
        "{% for m in messages %}\n    {% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n{% endfor %}\n{{ strftime_now('%Y') | length }}"
        "{{ tools | tojson if tools else '-' }}"
    )
    text = text_of(tmp_path, toys.byte_level(), source)
    talk = [{"role": "user", "content": "<\u4e16>"}, {"role": "user", "content": "no"}]
    other = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"name": "f"}]):
        assert decode(text, chat(text, talk, tools=tools)) == other.apply_chat_template(
            talk, tools=tools, tokenize=False
        )


def test_named_templates(tmp_path: Path) -> None:
    """Of several templates tools choose "tool_use"; a file of its own overrules tokenizer_config.json."""
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    text = text_of(tmp_path, toys.byte_level(), chat_template=both)
    talk = [{"role": "user", "content": "a"}]
    assert decode(text, chat(text, talk)) == "plain"
    assert decode(text, chat(text, talk, tools=[{}])) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    text = load_text(tmp_path)
    assert text is not None
    assert decode(text, chat(text, talk)) == "file"
    assert decode(text, chat(text, talk, tools=[{}])) == "file tools"


BAD_TALKS: dict[str, tuple[str, Any, str]] = {
    "template raises": (
        "{{ raise_exception('roles must alternate') }}",
        [{"role": "user", "content": "a"}],
        "roles must alternate",
    ),
    "template fails": ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "a"}], "TypeError"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "a"}], "SecurityError"),
    "renders to nothing": ("{{ '' }}", [{"role": "user", "content": "a"}], "no tokens"),
    "empty": (toys.CHATML, [], "at least one"),
    "a text": (toys.CHATML, "hello", "list"),
    "no object": (toys.CHATML, ["hello"], "message 0"),
    "role": (toys.CHATML, [{"role": "foo", "content": "a"}], "message 0: role 'foo'"),
    "no role": (toys.CHATML, [{"content": "a"}], "role None"),
    "no content": (toys.CHATML, [{"role": "user", "content": None}], "no content"),
    "assistant, nothing": (toys.CHATML, [{"role": "assistant"}], "no content"),
    "image": (toys.CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    "bad part": (toys.CHATML, [{"role": "user", "content": [{"type": "text"}]}], "a part must be"),
    "number": (toys.CHATML, [{"role": "user", "content": 5}], "content must be"),
    "surrogate": (toys.CHATML, [{"role": "user", "content": "\ud800"}], "Unicode"),
}


@pytest.mark.parametrize("name", BAD_TALKS)
def test_bad_talks(name: str, tmp_path: Path) -> None:
    """A conversation that can not be rendered is refused, naming messages and saying why in the template's words."""
    template, messages, match = BAD_TALKS[name]
    text = text_of(tmp_path, toys.byte_level(), template)
    with pytest.raises(InvalidRequest, match=match) as caught:
        chat(text, messages)
    assert caught.value.field == "messages"


def test_no_template(exact: dict[str, Text]) -> None:
    """A model without a chat template says so."""
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(exact["byte_level"], [{"role": "user", "content": "a"}])


def test_byte_level_within_others_is_refused(tmp_path: Path) -> None:
    """A decoder that mixes bytes and other rules would give half characters: refused when loading."""
    tokenizer = toys.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder: .*Strip"):
        load_text(toys.folder_of(tmp_path, tokenizer))


def test_token_that_is_no_special_of_the_file_is_added_as_special(tmp_path: Path) -> None:
    """A named special token that is only a plain word of the vocabulary is matched as a whole and skipped."""
    tokenizer = toys.byte_level((b"<END>",))
    text = text_of(tmp_path, tokenizer, eos_token="<END>")  # noqa: S106
    assert encode(text, "<END>", parse_special_tokens=True) == text.end_ids
    assert decode(text, text.end_ids) == ""
