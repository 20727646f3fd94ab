"""Tokens of a request's sequences, as pieces of text: what every endpoint that generates is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator

from attrs import define, frozen

from agentinfer.loop import SamplingParams, TokenLogprobs
from agentinfer.result import Reader, read, read_end, reader_of
from agentinfer.server.desk import Desk, News, Ticket, news
from agentinfer.server.mail import Ended
from agentinfer.server.problems import Problem, engine_failed, invalid
from agentinfer.text import Text


@frozen
class Piece:
    """What one choice says more."""

    index: int
    text: str
    tokens: tuple[int, ...]
    count: int
    """Tokens of the choice so far, these included."""
    finish: str | None = None
    """On the last piece: stop or length."""
    stop: int | str | None = None
    """The token id or the string that it stopped at, but for the model's own end tokens."""
    cached: int = 0
    """On the last piece: prompt tokens that were found instead of computed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first piece, if asked for."""


@define(eq=False)
class Voice:
    """Mutable: how far the text of one choice has been read."""

    reader: Reader
    count: int = 0


async def spoken(desk: Desk, ticket: Ticket, text: Text | None) -> AsyncIterator[list[Piece]]:
    """All that *ticket* asked for, as it comes; several tokens in a piece where the reader is slow.

    Raises Problem for a sequence that fails or is aborted, and if the engine dies.
    """
    voices = [Voice(reader_of(course.item.params)) for course in ticket.courses]
    left = len(voices)
    while left:
        found = await news(desk, ticket)
        pieces = [_piece(text, voices[one.index], one, ticket.courses[one.index].item.params) for one in found]
        left -= sum(piece.finish is not None for piece in pieces)
        yield pieces


def _piece(text: Text | None, voice: Voice, new: News, params: SamplingParams) -> Piece:
    ended, tokens = new.ended, tuple(new.tokens)
    shown = tokens[: len(tokens) - ended.num_hidden] if ended is not None else tokens
    words = ""
    if text is not None:
        voice.reader, words = read(text, voice.reader, shown)
        words += read_end(text, voice.reader) if ended is not None else ""
    voice.count += len(tokens)
    finish, stop = (None, None) if ended is None else _finish(voice.reader, ended, tokens, params)
    return Piece(
        index=new.index,
        text=words,
        tokens=tokens,
        count=voice.count,
        finish=finish,
        stop=stop,
        cached=0 if ended is None else ended.cached,
        logprobs=tuple(new.logprobs),
        prompt_logprobs=None if new.prompt_logprobs is None else tuple(new.prompt_logprobs),
    )


def _finish(
    reader: Reader, ended: Ended, tokens: tuple[int, ...], params: SamplingParams
) -> tuple[str, int | str | None]:
    """Why a sequence ended, and the stop token or string that it was. Raises Problem if it did not end well."""
    if ended.reason == "abort":
        raise Problem(503, f"aborted: {ended.detail}", "service_unavailable_error", code="aborted")
    if ended.field is not None:
        raise invalid(ended.field, ended.detail)
    if ended.reason not in ("stop", "length"):
        raise engine_failed(ended.detail)
    if reader.found is not None:
        return "stop", reader.found
    by_id = ended.reason == "stop" and tokens and tokens[-1] in params.stop_token_ids
    return ended.reason, tokens[-1] if by_id else None
