"""Text to token ids and back: tokenizer, chat template, incremental detokenizer.

Knows the text files of a model folder. Must not know requests in flight, tensors or clocks. `tokenizer.json` is read by
the `tokenizers` package and the chat template is rendered by jinja2 directly: importing transformers for them costs
seconds, and it is imported only for a folder that has no `tokenizer.json`. Code from a checkpoint is never run.

Rules that are fixed here:
* `encode` adds the special tokens that the tokenizer's post-processor adds, once. `tokenizer.json` alone decides, as in
  transformers 5: `add_bos_token` in tokenizer_config.json is not read. A literal such as `<|im_end|>` in a prompt is
  text like any other, unless `parse_special_tokens` is asked for: then it is that token, as in transformers.
* `chat` renders the template and adds no special token to what it wrote, so a BOS that the template writes is the only
  one: the ids are those of transformers' `apply_chat_template`.
* Decoding never tidies up spaces (`clean_up_tokenization_spaces` is not read): that would change what the model said.
* Ill-formed UTF-8 becomes U+FFFD: for byte-level tokenizers one for each longest ill-formed piece, for byte-fallback
  tokenizers one a byte. The text is what `tokenizer.decode` gives, with one exception: in a run of byte-fallback tokens
  that holds both good characters and bad bytes, `tokenizer.decode` also destroys the good ones. Those are kept here, as
  SentencePiece does; they have been sent long before the bad byte is seen.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from attrs import evolve, field, frozen

from agentinfer.chat_template import ChatTemplates, read_templates, render
from agentinfer.errors import CheckpointError, InvalidRequest
from agentinfer.models.folder import member, read_json_if_there

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
OTHER_VOCABULARIES: Final = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
    "tekken.json",
)
"""Files that make a tokenizer without `tokenizer.json`; transformers converts them."""
CHAT_END: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Tokens that end a turn, where the chat template writes them."""


# --- bytes to characters -------------------------------------------------------------------------------------------


@frozen
class Utf8:
    """The bytes of a character whose end has not come yet: at most three."""

    held: bytes = b""


def feed_utf8(state: Utf8, data: bytes, *, each_byte: bool = False) -> tuple[Utf8, str]:
    """Add *data*; the characters that are complete now. Joined with `flush_utf8`: the decoding of all bytes at once.

    Ill-formed input gives U+FFFD as soon as it is known to be ill-formed: one for each maximal ill-formed piece, or
    with *each_byte* one a byte. **Source**: the Unicode Standard, 3.9, "U+FFFD Substitution of Maximal Subparts".
    """
    data = state.held + data
    errors = "surrogateescape" if each_byte else "replace"
    text, used = codecs.utf_8_decode(data, errors, False)  # noqa: FBT003 - positional in C
    held = data[used:]
    if held[:1] == b"\xed" and held[1:] >= b"\xa0":  # a surrogate: Python waits for more, but nothing can mend it
        text, held = text + "\ufffd" * len(held), b""
    return Utf8(held), _ESCAPED.sub("\ufffd", text) if each_byte else text


def flush_utf8(state: Utf8, *, each_byte: bool = False) -> str:
    """What is left at the end: U+FFFD for a character that was cut off (one a byte with *each_byte*)."""
    return "\ufffd" * (len(state.held) if each_byte else min(len(state.held), 1))


_ESCAPED: Final = re.compile("[\udc80-\udcff]")


def _byte_level_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level token stands for. **Source**: GPT-2's `bytes_to_unicode`."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (b for b in range(256) if b not in printable)
    return MappingProxyType({chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)})


_BYTE_OF: Final = _byte_level_alphabet()
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


# --- the records ---------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Text:
    """All that a model folder says about text. Made by `load_text`."""

    folder: Path
    tokenizer: Tokenizer
    decoding: Literal["bytes", "fallback", "pieces"]
    """Tokens are bytes; or pieces of text with byte tokens among them; or pieces of text alone."""
    special: frozenset[str] = field(repr=False)
    """The tokens that `skip_special_tokens` skips."""
    special_ids: frozenset[int] = field(repr=False)
    literal: Callable[[], Tokenizer] = field(repr=False)
    """The tokenizer that takes special tokens in a text for text. Made when it is first asked for."""
    named: Mapping[str, str] = field(repr=False)
    """`bos_token`, `eos_token`, ...: what chat templates call the special tokens."""
    templates: ChatTemplates = field(repr=False)
    end_ids: tuple[int, ...]
    """The tokenizer's own end token, and the turn-end tokens that the chat template writes."""


@frozen
class Decoder:
    """Where the decoding of one output stands. Immutable: an older one can be gone on from, too."""

    skip_special_tokens: bool = True
    utf8: Utf8 = Utf8()
    before: tuple[str, ...] = ()
    """The last token decoded, if the text of the next one depends on it; () at the start of the output."""
    spaces_between_special_tokens: bool = True
    """Keep the spaces that some tokenizers put between tokens where both are special ones."""


# --- loading -------------------------------------------------------------------------------------------------------


def load_text(folder: Path) -> Text | None:
    """The tokenizer and chat template in the model *folder*; None if it has no tokenizer.

    Raises CheckpointError naming the file: unreadable or contradictory files, links that leave the folder, a tokenizer
    that needs code of the checkpoint.
    """
    config = read_json_if_there(folder, TOKENIZER_CONFIG) or {}
    path = member(folder, TOKENIZER)
    if path is not None:
        tokenizer, named = _read_tokenizer(path), _named(folder, config)
        _add_missing(tokenizer, config, named, folder)
    elif any(member(folder, name) is not None for name in OTHER_VOCABULARIES):
        tokenizer, named = _convert_tokenizer(folder)
    elif config:
        raise CheckpointError(
            f"{folder / TOKENIZER}: missing, though there is a {TOKENIZER_CONFIG}: an incomplete download?"
        )
    else:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    templates = read_templates(folder, config, folder / TOKENIZER_CONFIG)
    ends = [named["eos_token"]] if "eos_token" in named else []
    ends += [token for token in CHAT_END if any(token in source for source in templates.sources.values())]
    known = (tokenizer.token_to_id(token) for token in ends)
    added = tokenizer.get_added_tokens_decoder()
    return Text(
        folder=folder,
        tokenizer=tokenizer,
        decoding=_decoding(tokenizer, folder),
        special=frozenset(str(t.content) for t in added.values() if t.special),
        special_ids=frozenset(i for i, t in added.items() if t.special),
        literal=cache(partial(_literal, tokenizer)),
        named=MappingProxyType(named),
        templates=templates,
        end_ids=tuple(sorted({token for token in known if token is not None})),
    )


def eos_union(model_eos_ids: Iterable[int], text: Text | None) -> tuple[int, ...]:
    """The ids that end a generation, sorted.

    The union of *model_eos_ids* (generation_config.json's, else config.json's), the tokenizer's own end token, and
    the tokens that end a turn in the chat template: an instruct model whose config names `<|endoftext|>` alone must
    still stop at `<|im_end|>`.
    """
    return tuple(sorted({*model_eos_ids, *(text.end_ids if text is not None else ())}))


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises plain Exception
        raise CheckpointError(f"{path}: no tokenizer that can be read: {e}") from e


def _convert_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a folder without tokenizer.json, by transformers: seconds of import."""
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained
    try:
        found = load(folder, trust_remote_code=False, local_files_only=True, use_fast=True)
    except Exception as e:  # it raises whatever its converters do
        raise CheckpointError(f"{folder}: no {TOKENIZER}, and transformers can not make one: {_line(e)}") from e
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{folder}: no {TOKENIZER}, and {type(found).__name__} can not be converted to one")
    return backend, {k: str(v) for k, v in found.special_tokens_map.items() if isinstance(v, str)}


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens: `special_tokens_map.json` (older checkpoints), overruled by tokenizer_config.json."""
    named: dict[str, str] = {}
    for place in (read_json_if_there(folder, "special_tokens_map.json") or {}, config):
        for name, value in place.items():
            content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                named[name] = content
            elif name.endswith("_token") and content is None:
                named.pop(name, None)
    return named


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], folder: Path) -> None:
    """Add the tokens that only tokenizer_config.json declares, as transformers does. *tokenizer* is changed."""
    from tokenizers import AddedToken

    where, change = folder / TOKENIZER_CONFIG, cast("Any", tokenizer)  # its own stubs say list[Unknown]
    known = {str(t.content) for t in tokenizer.get_added_tokens_decoder().values()}
    try:
        declared = sorted((int(i), dict(t)) for i, t in dict(config.get("added_tokens_decoder") or {}).items())
        missing = [
            (i, AddedToken(**{k: v for k, v in t.items() if k in _TOKEN_FIELDS}))
            for i, t in declared
            if t["content"] not in known
        ]
    except (TypeError, ValueError, KeyError) as e:
        raise CheckpointError(f"{where}: added_tokens_decoder: {_line(e)}") from e
    for token_id, token in missing:
        (change.add_special_tokens if token.special else change.add_tokens)([token])
        got = tokenizer.token_to_id(token.content)
        if got != token_id:
            raise CheckpointError(
                f"{where}: added_tokens_decoder: {token.content!r} is {token_id} here, but {got} by {TOKENIZER}"
            )
    known |= {str(t.content) for _, t in missing}
    change.add_special_tokens([AddedToken(t, special=True) for t in dict.fromkeys(named.values()) if t not in known])


_TOKEN_FIELDS: Final = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})


def _literal(tokenizer: Tokenizer) -> Tokenizer:
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(tokenizer.to_str())
    found.encode_special_tokens = True  # "encode them as text"
    return found


def _decoding(tokenizer: Tokenizer, folder: Path) -> Literal["bytes", "fallback", "pieces"]:
    if tokenizer.decoder is None:
        return "pieces"
    said = cast("dict[str, Any]", json.loads(tokenizer.decoder.__getstate__()))
    kinds = [str(d["type"]) for d in said.get("decoders", [said])]
    if "ByteLevel" not in kinds:
        return "fallback" if "ByteFallback" in kinds else "pieces"
    if [k for k in kinds if k != "Fuse"] != ["ByteLevel"]:
        raise CheckpointError(f"{folder / TOKENIZER}: decoder: ByteLevel together with {kinds} is not supported")
    return "bytes"


# --- text to ids and back ------------------------------------------------------------------------------------------


def chat(
    text: Text,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> tuple[int, ...]:
    """The prompt of a conversation, as ids: the chat template rendered, no special token added to what it wrote.

    *variables* reach the template (`enable_thinking=False`, ...). Messages: see `chat_template.render`. Raises
    InvalidRequest (field `messages`): no template, a bad message, an error that the template raises (its own words),
    a rendering without tokens.
    """
    rendered = render(
        text.templates,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        variables={**text.named, **variables},
    )
    ids = encode(text, rendered, add_special_tokens=False, parse_special_tokens=True, field="messages")
    if not ids:
        raise InvalidRequest("messages", "the chat template makes no tokens of them")
    return ids


def encode(
    text: Text,
    prompt: str,
    *,
    add_special_tokens: bool = True,
    parse_special_tokens: bool = False,
    field: str = "prompt",
) -> tuple[int, ...]:
    """The ids of *prompt*, by the rules at the head of this module. *field*: named in errors.

    *parse_special_tokens*: special tokens in it are those tokens, not text: for what a chat template wrote. Raises
    InvalidRequest for what is no text, or holds half of a surrogate pair. No text gives no ids, or those that the
    tokenizer adds.
    """
    if not isinstance(prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance] - from outside
        raise InvalidRequest(field, f"must be a text, not {type(prompt).__name__}")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidRequest(field, f"is no valid Unicode: {prompt[e.start]!r} at character {e.start}") from e
    found = _encoded(text.tokenizer, prompt, add_special_tokens)
    said = (token for token, added in zip(found.ids, found.special_tokens_mask, strict=True) if not added)
    if not parse_special_tokens and not text.special_ids.isdisjoint(said):
        found = _encoded(text.literal(), prompt, add_special_tokens)
    return tuple(found.ids)


def _encoded(tokenizer: Tokenizer, prompt: str, add_special_tokens: bool) -> Encoding:
    """Other threads go on meanwhile: of the ways to encode, only those of a batch release the interpreter's lock."""
    return tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)[0]


def decode(text: Text, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of a whole output: what feeding and flushing gives. Ids that no token has are nothing."""
    decoder, words = feed(text, new_decoder(skip_special_tokens=skip_special_tokens), ids)
    return words + flush_text(text, decoder)


def new_decoder(*, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder:
    """The start of an output."""
    return Decoder(skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens)


def feed(text: Text, decoder: Decoder, ids: Iterable[int]) -> tuple[Decoder, str]:
    """The text that is certain after *ids*, and not given before; a character comes when its last byte has come.

    Time is linear in the new ids, whatever came before; at most three bytes are held back.
    """
    found = (text.tokenizer.id_to_token(i) for i in ids)
    skipped = text.special if decoder.skip_special_tokens else frozenset[str]()
    tokens = (token for token in found if token is not None and token not in skipped)
    if text.decoding == "bytes":
        utf8, words = feed_utf8(decoder.utf8, b"".join(map(_bytes_of, tokens)))
        return decoder if utf8 == decoder.utf8 else evolve(decoder, utf8=utf8), words
    pieces: list[str] = []
    for token in tokens:
        decoder, words = _feed_piece(text, decoder, token)
        pieces.append(words)
    return decoder, "".join(pieces)


def lengths(text: Text, decoder: Decoder, ids: Iterable[int]) -> tuple[Decoder, tuple[int, ...]]:
    """The characters that `feed` gives for each of *ids*, counted: a character is that of the token that ends it."""
    found: list[int] = []
    for token in ids:
        decoder, words = feed(text, decoder, (token,))
        found.append(len(words))
    return decoder, tuple(found)


def flush_text(text: Text, decoder: Decoder) -> str:
    """The end of an output: U+FFFD if a character was cut off, else nothing."""
    return flush_utf8(decoder.utf8, each_byte=text.decoding != "bytes")


@lru_cache(1 << 18)
def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token. An added token with a character that stands for no byte is its own text."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode("utf-8", "replace")


def _feed_piece(text: Text, decoder: Decoder, token: str) -> tuple[Decoder, str]:
    """One token of a tokenizer whose tokens are pieces of text, with byte tokens among them or not.

    The text of a piece depends on the token before it at most (prefix space, word ends), so two tokens are decoded, and
    what the first alone gives is cut off. Byte tokens are gathered into characters; only the very first characters go
    through the tokenizer's decoder too, which may strip a space there.
    """
    before = decoder.before
    byte = _BYTE_TOKEN.fullmatch(token) if text.decoding == "fallback" else None
    if byte is None:
        cut = flush_text(text, decoder)
        if cut:
            before = before or ("<0xFF>",)
        if not decoder.spaces_between_special_tokens and token in text.special and {*before} & text.special:
            words = token
        else:
            words = _join(text, (*before, token))[len(_join(text, before)) :]
        return evolve(decoder, utf8=Utf8(), before=(token,)), cut + words
    data = bytes.fromhex(byte[1])
    utf8, words = feed_utf8(decoder.utf8, data, each_byte=True)
    if not words:
        return evolve(decoder, utf8=utf8), ""
    if not before:
        gathered = decoder.utf8.held + data
        words = _join(text, tuple(f"<0x{b:02X}>" for b in gathered[: len(gathered) - len(utf8.held)]))
    return evolve(decoder, utf8=utf8, before=(token,)), words


def _join(text: Text, tokens: tuple[str, ...]) -> str:
    if text.tokenizer.decoder is None:
        return " ".join(tokens)
    return text.tokenizer.decoder.decode(list(tokens)) if tokens else ""


def _line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
