"""`POST /tokenize`, `/detokenize`, and `/generate`: token ids in, token ids out. **Source**: vLLM's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from agentinfer.server.answer import ignored_header, json_response, streamed, whole
from agentinfer.server.chat import prompt_of
from agentinfer.server.logprobs import by_id, content
from agentinfer.server.problems import Problem, invalid
from agentinfer.server.protocol import (
    SAMPLING,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    check_stream_options,
    sampling_of,
)
from agentinfer.server.site import Asked, Site, enter, in_pool, items_of, new_name, read, salt_of
from agentinfer.server.tools import choice_of
from agentinfer.server.usage import count_of, last_chunk, note, usage, with_usage
from agentinfer.server.voice import Piece, spoken
from agentinfer.text import Text, decode, encode

_NONE: Final = frozenset[str]()
_SAMPLING: Final = SAMPLING | {"logprobs", "prompt_logprobs"}


async def tokenize(site: Site, request: Request) -> Response:
    """The token ids of a prompt, or of messages."""
    _, body = await read(site, request, TokenizeBody, _NONE)
    text = _text_of(site)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "prompt: give either prompt or messages")
    if body.prompt is None:
        ids = await in_pool(site, partial(prompt_of, text, body, choice_of(body.tools, None)))
    else:
        special = body.add_special_tokens is not False
        ids = await in_pool(site, partial(encode, text, body.prompt, add_special_tokens=special))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": site.max_model_len, "tokens": list(ids)}
    found["token_strs"] = [text.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return json_response(found, headers=ignored_header(request.scope))


async def detokenize(site: Site, request: Request) -> Response:
    """The text of token ids."""
    _, body = await read(site, request, DetokenizeBody, _NONE)
    text = _text_of(site)
    size = text.tokenizer.get_vocab_size()
    for i, token in enumerate(body.tokens):
        if not 0 <= token < 2**31:
            raise invalid("tokens", f"tokens: item {i} is no token id of a vocabulary of {size}: {token}")
    words = await in_pool(site, partial(decode, text, body.tokens, skip_special_tokens=False))
    return json_response({"prompt": words}, headers=ignored_header(request.scope))


def _text_of(site: Site) -> Text:
    if site.text is None:
        raise Problem(400, "the model has no tokenizer")
    return site.text


async def generate(site: Site, request: Request) -> ASGIApp:
    """Continue token ids in `n` ways, without a word of text unless stop strings ask for it."""
    raw, body = await read(site, request, GenerateBody, _NONE)
    options = check_stream_options(body.stream, body.stream_options)
    given = body.sampling_params
    for name, value in given.items():
        if name not in _SAMPLING and value is not None:
            raise invalid("sampling_params", f"sampling_params: {name}: is not known")
    for name, value in raw.items():
        if name in _SAMPLING and value is not None:
            raise invalid(name, f"{name}: belongs in sampling_params")
    more = {name: given.get(name) for name in ("logprobs", "prompt_logprobs")}
    params = sampling_of(given, **more)
    if not body.token_ids:
        raise invalid("token_ids", "token_ids: has no tokens")
    items = items_of(site, [tuple(body.token_ids)], params, salt_of(request.scope, body.cache_salt))
    head = {"request_id": new_name("gen", request, body.request_id), "model": site.names[0]}
    ticket = await enter(site, request, head["request_id"], items)
    asked = Asked(site, ticket, head, params, options)
    return streamed(site, ticket, partial(_events, asked)) if body.stream else whole(site, ticket, partial(_all, asked))


async def _events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
    count = count_of(asked.ticket, asked.params.n)
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            chunk = {**asked.head, "choices": [_choice(asked, piece, list(piece.tokens), list(piece.logprobs))]}
            yield with_usage(chunk, asked.options, count, piece.index)
    for chunk in last_chunk(asked.head, asked.options, count):
        yield chunk


async def _all(asked: Asked) -> dict[str, Any]:
    count = count_of(asked.ticket, asked.params.n)
    tokens: list[list[int]] = [[] for _ in asked.ticket.courses]
    judged: list[list[Any]] = [[] for _ in asked.ticket.courses]
    ends: dict[int, Piece] = {}
    prompt_logprobs: list[Any] | None = None
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            tokens[piece.index] += piece.tokens
            judged[piece.index] += piece.logprobs
            if piece.prompt_logprobs is not None:
                prompt_logprobs = [None if x is None else by_id(asked.site.text, x) for x in piece.prompt_logprobs]
            if piece.finish is not None:
                ends[piece.index] = piece
    choices = [_choice(asked, ends[i], tokens[i], judged[i]) for i in range(len(tokens))]
    return {**asked.head, "choices": choices, "prompt_logprobs": prompt_logprobs, "usage": usage(count)}


def _choice(asked: Asked, piece: Piece, tokens: list[int], judged: list[Any]) -> dict[str, Any]:
    most = asked.params.logprobs
    return {
        "index": piece.index,
        "token_ids": tokens,
        "logprobs": None if most is None else content(asked.site.text, judged, most),
        "finish_reason": piece.finish,
        "stop_reason": piece.stop,
    }
