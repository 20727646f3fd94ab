"""Log-probabilities, as the two endpoints of OpenAI's API say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define

from agentinfer.loop import TokenLogprobs
from agentinfer.text import Decoder, Text, decode, feed

Column = dict[str, list[Any]]
"""text_offset, tokens, token_logprobs, top_logprobs: an element a token. **Source**: the OpenAI API, "Completions"."""


@define(eq=False)
class Track:
    """Mutable: how many characters come before the next token's own text."""

    decoder: Decoder
    length: int = 0


def column(
    text: Text | None, track: Track, ids: Sequence[int], judged: Sequence[TokenLogprobs | None], most: int
) -> Column:
    """The tokens *ids*, *judged*, with at most *most* alternatives and the token itself."""
    offsets: list[int] = []
    for token in ids:
        offsets.append(track.length)
        if text is not None:
            track.decoder, words = feed(text, track.decoder, (token,))
            track.length += len(words)
    return {
        "text_offset": offsets,
        "tokens": [token_text(text, token) for token in ids],
        "token_logprobs": [None if one is None else one.logprob for one in judged],
        "top_logprobs": [None if one is None else _alternatives(text, one, most) for one in judged],
    }


def joined(first: Column | None, then: Column | None) -> Column | None:
    """Both, one after the other."""
    if first is None or then is None:
        return first if then is None else then
    return {name: [*values, *then[name]] for name, values in first.items()}


def by_id(text: Text | None, one: TokenLogprobs) -> dict[str, dict[str, Any]]:
    """A token of a prompt and its alternatives, by id. **Source**: vLLM's `prompt_logprobs`."""
    ranked = [(one.token_id, one.logprob, one.rank)]
    ranked += [(i, p, rank) for rank, (i, p) in enumerate(zip(one.top_ids, one.top_logprobs, strict=True), 1)]
    return {
        str(i): {"logprob": p, "rank": rank, "decoded_token": token_text(text, i)} for i, p, rank in reversed(ranked)
    }


def content(text: Text | None, judged: Sequence[TokenLogprobs], most: int) -> dict[str, Any]:
    """The tokens of a chat's answer. **Source**: the OpenAI API, "Chat", `logprobs`."""
    return {
        "content": [
            {
                **_entry(text, one.token_id, one.logprob),
                "top_logprobs": [
                    _entry(text, i, p) for i, p in list(zip(one.top_ids, one.top_logprobs, strict=True))[:most]
                ],
            }
            for one in judged
        ]
    }


def token_text(text: Text | None, token: int) -> str:
    """How a token is called."""
    return f"token_id:{token}" if text is None else decode(text, (token,), skip_special_tokens=False)


def _entry(text: Text | None, token: int, logprob: float) -> dict[str, Any]:
    words = token_text(text, token)
    return {"token": words, "logprob": logprob, "bytes": list(words.encode())}


def _alternatives(text: Text | None, one: TokenLogprobs, most: int) -> dict[str, float]:
    pairs = [*zip(one.top_ids[:most], one.top_logprobs[:most], strict=True), (one.token_id, one.logprob)]
    found: dict[str, float] = {}
    for token, logprob in pairs:
        found.setdefault(token_text(text, token), logprob)  # of two tokens with one text, the likelier
    return found
