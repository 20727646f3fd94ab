"""`POST /v1/completions`. **Source**: the OpenAI API, "Completions"; vLLM's additions to it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from attrs import define, frozen
from starlette.requests import Request
from starlette.types import ASGIApp

from agentinfer.loop import SamplingParams, TokenLogprobs
from agentinfer.result import reader_of, token_ids
from agentinfer.server.answer import streamed, whole
from agentinfer.server.logprobs import Column, Track, by_id, column, joined
from agentinfer.server.problems import Problem, invalid
from agentinfer.server.protocol import (
    CompletionBody,
    check_stream_options,
    prompts_of,
    sampling_of,
)
from agentinfer.server.site import Asked, Site, enter, in_pool, items_of, new_name, read, salt_of
from agentinfer.server.structure import structure_of
from agentinfer.server.usage import count_of, last_chunk, note, usage, with_usage
from agentinfer.server.voice import Piece, spoken
from agentinfer.text import decode, encode, new_decoder

_DEFAULT_MAX_TOKENS = 16
"""**Source**: the OpenAI API, "Completions"."""


@frozen(eq=False)
class _Want:
    """What is asked of a completion's answer."""

    prompts: tuple[str, ...] | None
    """The text of each prompt, if it is to be echoed."""
    were_texts: bool
    """The prompts were given as such: special tokens in them are what the tokenizer added."""
    unwanted: bool
    """max_tokens is 0: only the echo counts."""
    show_ids: bool


async def completions(site: Site, request: Request) -> ASGIApp:
    """Continue each of the prompts in `n` ways."""
    raw, body = await read(site, request, CompletionBody)
    options = check_stream_options(body.stream, body.stream_options)
    unwanted = raw.get("max_tokens") == 0 and bool(body.echo)
    params = _params(raw, body, unwanted=unwanted)
    given, many = prompts_of(body.prompt)
    prompts = await in_pool(site, partial(_encoded, site, given, body, many=many))
    echoed = await in_pool(site, partial(_texts, site, given, prompts)) if body.echo else None
    items = items_of(site, prompts, params, salt_of(request.scope, body.cache_salt), _DEFAULT_MAX_TOKENS)
    name = new_name("cmpl", request, body.request_id)
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": site.names[0]}
    ticket = await enter(site, request, name, items)
    texts = isinstance(given[0], str)
    ids = bool(body.return_token_ids) or site.text is None  # without a tokenizer they are all there is to say
    asked, want = Asked(site, ticket, head, params, options), _Want(echoed, texts, unwanted, ids)
    if body.stream:
        return streamed(site, ticket, partial(_events, asked, want))
    return whole(site, ticket, partial(_all, asked, want))


def _params(raw: dict[str, Any], body: CompletionBody, *, unwanted: bool) -> SamplingParams:
    """Raises Problem."""
    more: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    if unwanted:
        more["max_tokens"] = 1
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs: not with stream=true")
    return sampling_of(raw, **more, **structure_of(body.response_format))


def _encoded(site: Site, given: list[str | list[int]], body: CompletionBody, *, many: bool) -> list[tuple[int, ...]]:
    """Raises InvalidRequest, and Problem naming the item."""
    found: list[tuple[int, ...]] = []
    for i, prompt in enumerate(given):
        if isinstance(prompt, str) and site.text is not None:
            special = body.add_special_tokens is not False
            ids = encode(site.text, prompt, add_special_tokens=special)
        else:
            ids = token_ids(site.text, prompt)
        if not ids:
            raise invalid("prompt", f"prompt: {f'item {i} ' if many else ''}has no tokens")
        found.append(ids)
    return found


def _texts(site: Site, given: list[str | list[int]], prompts: list[tuple[int, ...]]) -> tuple[str, ...]:
    """What an echo says. Raises Problem without a tokenizer."""
    if site.text is None:
        raise Problem(400, "echo: the model has no tokenizer", param="echo")
    return tuple(
        prompt if isinstance(prompt, str) else decode(site.text, ids, skip_special_tokens=False)
        for prompt, ids in zip(given, prompts, strict=True)
    )


@define(eq=False)
class _Choice:
    """Mutable: what one choice has said so far."""

    track: Track
    text: str = ""
    tokens: tuple[int, ...] = ()
    column: Column | None = None
    judged: tuple[TokenLogprobs | None, ...] | None = None
    """Of the prompt."""
    begun: bool = False


def _new_choices(asked: Asked) -> list[_Choice]:
    decoder = reader_of(asked.params).decoder
    return [_Choice(Track(decoder)) for _ in asked.ticket.courses]


def _said(asked: Asked, want: _Want, choice: _Choice, piece: Piece) -> tuple[str, Column | None]:
    """Text and log-probabilities that *piece* adds, with the echo before the first."""
    text, most = asked.site.text, asked.params.logprobs
    words, before = "", None
    if piece.prompt_logprobs is not None:
        choice.judged = piece.prompt_logprobs
    if not choice.begun and want.prompts is not None and (piece.tokens or piece.finish is not None):
        words = want.prompts[piece.index // asked.params.n]
        if most is not None and choice.judged is not None:
            prompt = asked.ticket.courses[piece.index].item.prompt
            start = Track(new_decoder(skip_special_tokens=want.were_texts))
            before = column(text, start, prompt, choice.judged, most)
        choice.track.length = len(words)
    choice.begun = choice.begun or bool(piece.tokens)
    if want.unwanted:
        return words, before
    after = None if most is None else column(text, choice.track, piece.tokens, piece.logprobs, most)
    return words + piece.text, joined(before, after)


async def _events(asked: Asked, want: _Want) -> AsyncIterator[dict[str, Any]]:
    choices = _new_choices(asked)
    count = count_of(asked.ticket, asked.params.n, shown=not want.unwanted)
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            words, judged = _said(asked, want, choices[piece.index], piece)
            if words or judged is not None or piece.finish is not None or want.show_ids:
                choice = _choice(want, piece, words, judged)
                if want.show_ids:
                    choice["token_ids"] = list(piece.tokens)
                yield with_usage({**asked.head, "choices": [choice]}, asked.options, count, piece.index)
    for chunk in last_chunk(asked.head, asked.options, count):
        yield chunk


async def _all(asked: Asked, want: _Want) -> dict[str, Any]:
    said = _new_choices(asked)
    ends: dict[int, Piece] = {}
    count = count_of(asked.ticket, asked.params.n, shown=not want.unwanted)
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            choice = said[piece.index]
            words, judged = _said(asked, want, choice, piece)
            choice.text += words
            choice.tokens += piece.tokens
            choice.column = joined(choice.column, judged)
            if piece.finish is not None:
                ends[piece.index] = piece
    return {**asked.head, "choices": _choices(asked, want, said, ends), "usage": usage(count)}


def _choices(asked: Asked, want: _Want, said: list[_Choice], ends: dict[int, Piece]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, choice in enumerate(said):
        one = _choice(want, ends[index], choice.text, choice.column)
        if want.show_ids:
            one["token_ids"] = list(choice.tokens)
            one["prompt_token_ids"] = list(asked.ticket.courses[index].item.prompt)
        if choice.judged is not None:
            one["prompt_logprobs"] = [None if x is None else by_id(asked.site.text, x) for x in choice.judged]
        found.append(one)
    return found


def _choice(want: _Want, piece: Piece, words: str, judged: Column | None) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": words,
        "logprobs": judged,
        "finish_reason": "length" if want.unwanted and piece.finish is not None else piece.finish,
        "stop_reason": piece.stop,
    }
