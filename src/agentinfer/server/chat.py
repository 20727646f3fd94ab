"""`POST /v1/chat/completions`. **Source**: the OpenAI API, "Chat"; vLLM's additions to it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, Final

from attrs import define, evolve, field, frozen
from starlette.requests import Request
from starlette.types import ASGIApp

from agentinfer.loop import SamplingParams
from agentinfer.parsers import Format, Parser, Said, ToolCall, collect, finish, new_parser, opens_thinking, step
from agentinfer.server.answer import streamed, whole
from agentinfer.server.logprobs import by_id, content
from agentinfer.server.problems import Problem, invalid
from agentinfer.server.protocol import ChatBody, check_stream_options, sampling_of
from agentinfer.server.site import Asked, Site, enter, in_pool, items_of, new_name, read, salt_of
from agentinfer.server.structure import structure_of
from agentinfer.server.tools import (
    Choice,
    call_object,
    choice_of,
    forced_call,
    reading,
    tags_are_special,
    with_arguments,
)
from agentinfer.server.usage import Count, count_of, last_chunk, note, usage, with_usage
from agentinfer.server.voice import Piece, spoken
from agentinfer.text import Text, chat, decode

_OWN: Final = frozenset({"text", "messages", "tools", "add_generation_prompt"})
"""What a template gets from the request itself."""


@frozen(eq=False)
class _Want:
    """What is asked of a chat's answer, and how it is read."""

    form: Format | None
    """How reasoning and calls are written; None: neither is looked for."""
    thinking: bool
    """The prompt has begun the reasoning."""
    forced: bool
    """The answer is one call, as JSON."""
    one_call: bool
    """Of several calls only the first is told."""
    body: ChatBody


async def completions(site: Site, request: Request) -> ASGIApp:
    """Answer a conversation in `n` ways."""
    raw, body = await read(site, request, ChatBody)
    options = check_stream_options(body.stream, body.stream_options)
    if site.text is None:
        raise Problem(400, "messages: the model has no tokenizer; use /generate", param="messages")
    choice = choice_of(body.tools, body.tool_choice)
    params, form = _params(raw, body, choice), site.form
    if form is not None:
        form = reading(form, calls=bool(choice.tools) and not choice.forced)
        if tags_are_special(site.text, form):
            params = evolve(params, skip_special_tokens=False)
    prompt = await in_pool(site, partial(prompt_of, site.text, body, choice))
    items = items_of(site, [prompt], params, salt_of(request.scope, body.cache_salt))
    name = new_name("chatcmpl", request, body.request_id)
    created = int(time.time())
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": name, "object": kind, "created": created, "model": site.names[0]}
    thinking = form is not None and opens_thinking(form, decode(site.text, prompt[-16:], skip_special_tokens=False))
    ticket = await enter(site, request, name, items)
    one_call = body.parallel_tool_calls is False
    asked, want = Asked(site, ticket, head, params, options), _Want(form, thinking, choice.forced, one_call, body)
    if body.stream:
        return streamed(site, ticket, partial(_events, asked, want))
    return whole(site, ticket, partial(_all, asked, want))


def _params(raw: dict[str, Any], body: ChatBody, choice: Choice) -> SamplingParams:
    """Raises Problem."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: only with logprobs=true")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise invalid("top_logprobs", f"top_logprobs: must be at least 0, not {body.top_logprobs}")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs: not with stream=true")
    more: dict[str, Any] = {
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "prompt_logprobs": body.prompt_logprobs,
    }
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
    structure = structure_of(body.response_format)
    if structure and choice.params:
        raise invalid("response_format", "response_format: not together with a tool_choice that forces a call")
    return sampling_of(raw, **more, **structure, **choice.params)


def prompt_of(text: Text, body: Any, choice: Choice) -> tuple[int, ...]:
    """The prompt of *body*'s messages, as the chat template writes it. Raises InvalidRequest and Problem."""
    variables = dict(body.chat_template_kwargs or {})
    if not _OWN.isdisjoint(variables):
        names = ", ".join(sorted(_OWN & variables.keys()))
        raise invalid("chat_template_kwargs", f"chat_template_kwargs: {names} can not be given here")
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    return chat(
        text,
        with_arguments(body.messages),
        tools=choice.tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        **variables,
    )


@define(eq=False)
class _Answer:
    """Mutable: how far one choice has been read."""

    parser: Parser | None
    forced: str = ""
    """The text of a forced call."""
    calls: int = 0
    """Made so far."""
    told: int = 0
    """Calls that a stream told."""
    said: list[Said | str] = field(factory=list["Said | str"])
    tokens: list[int] = field(factory=list[int])
    judged: list[Any] = field(factory=list[Any])
    begun: bool = False


def _new_answers(asked: Asked, want: _Want) -> list[_Answer]:
    parser = None if want.form is None else new_parser(want.form, thinking=want.thinking)
    return [_Answer(parser) for _ in asked.ticket.courses]


def _read(want: _Want, answer: _Answer, piece: Piece) -> list[Said | str]:
    """What *piece* adds: content as text, reasoning and calls as such."""
    if want.forced:
        answer.forced += piece.text
        if piece.finish is None:
            return []
        call = forced_call(answer.forced)
        found: list[Said | str] = [answer.forced] if call is None else [call]
    elif answer.parser is None:
        return [piece.text] if piece.text else []
    else:
        answer.parser, told = step(answer.parser, piece.text)
        found = [*told, *(finish(answer.parser) if piece.finish is not None else ())]
    return [one for one in found if _wanted(want, answer, one)]


def _wanted(want: _Want, answer: _Answer, one: Said | str) -> bool:
    if not isinstance(one, ToolCall):
        return True
    answer.calls += 1
    return answer.calls == 1 or not want.one_call


def _finish_reason(answer: _Answer, piece: Piece) -> str | None:
    return "tool_calls" if piece.finish == "stop" and answer.calls else piece.finish


async def _events(asked: Asked, want: _Want) -> AsyncIterator[dict[str, Any]]:
    answers, count = _new_answers(asked, want), count_of(asked.ticket, asked.params.n)
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            for chunk in _chunks(asked, want, answers[piece.index], piece, count):
                yield chunk
    for chunk in last_chunk(asked.head, asked.options, count):
        yield chunk


def _chunks(asked: Asked, want: _Want, answer: _Answer, piece: Piece, count: Count) -> Iterable[dict[str, Any]]:
    """What *piece* adds to a stream: a chunk for who speaks, one for each thing said, and the end in the last one."""
    deltas = [delta for one in _read(want, answer, piece) if (delta := _delta(want, answer, one))]
    if not answer.begun:
        answer.begun = True
        yield _chunk(asked, want, piece, {"role": "assistant", "content": ""}, count)
    judged = content(asked.site.text, piece.logprobs, asked.params.logprobs or 0) if piece.logprobs else None
    if not deltas and (piece.finish is not None or judged is not None or want.body.return_token_ids):
        deltas.append({})
    for i, delta in enumerate(deltas):
        last = i == len(deltas) - 1
        reason = _finish_reason(answer, piece) if last else None
        yield _chunk(asked, want, piece, delta, count, reason, judged if i == 0 else None, ids=i == 0)


def _chunk(
    asked: Asked,
    want: _Want,
    piece: Piece,
    delta: dict[str, Any],
    count: Count,
    reason: str | None = None,
    judged: dict[str, Any] | None = None,
    *,
    ids: bool = False,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": piece.index, "delta": delta, "logprobs": judged, "finish_reason": reason}
    if reason is not None:
        choice["stop_reason"] = piece.stop
    if ids and want.body.return_token_ids:
        choice["token_ids"] = list(piece.tokens)
    return with_usage({**asked.head, "choices": [choice]}, asked.options, count, piece.index)


def _delta(want: _Want, answer: _Answer, one: Said | str) -> dict[str, Any]:
    """What *one* adds to the message; empty: nothing that was asked for."""
    if isinstance(one, str):
        return {"content": one}
    if isinstance(one, ToolCall):
        answer.told += 1
        return {"tool_calls": [{"index": answer.told - 1, **call_object(one)}]}
    if one.kind == "content":
        return {"content": one.text}
    return {"reasoning": one.text, "reasoning_content": one.text} if want.body.include_reasoning is not False else {}


async def _all(asked: Asked, want: _Want) -> dict[str, Any]:
    answers, count = _new_answers(asked, want), count_of(asked.ticket, asked.params.n)
    ends: dict[int, Piece] = {}
    prompt_logprobs: list[Any] | None = None
    async for pieces in spoken(asked.site.desk, asked.ticket, asked.site.text):
        note(count, pieces)
        for piece in pieces:
            answer = answers[piece.index]
            answer.said += _read(want, answer, piece)
            answer.tokens += piece.tokens
            answer.judged += piece.logprobs
            if piece.prompt_logprobs is not None:
                prompt_logprobs = [None if x is None else by_id(asked.site.text, x) for x in piece.prompt_logprobs]
            if piece.finish is not None:
                ends[piece.index] = piece
    choices = [_whole_choice(asked, want, answers[index], ends[index]) for index in range(len(answers))]
    answer = {**asked.head, "choices": choices, "usage": usage(count)}
    return answer if prompt_logprobs is None else {**answer, "prompt_logprobs": prompt_logprobs}


def _whole_choice(asked: Asked, want: _Want, answer: _Answer, end: Piece) -> dict[str, Any]:
    reply = collect(one for one in answer.said if not isinstance(one, str))
    words = "".join(one for one in answer.said if isinstance(one, str)) + reply.content
    message: dict[str, Any] = {"role": "assistant", "content": words or (None if reply.calls else ""), "refusal": None}
    if reply.reasoning and want.body.include_reasoning is not False:
        message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
    if reply.calls:
        message["tool_calls"] = [call_object(call) for call in reply.calls]
    judged = None if asked.params.logprobs is None else content(asked.site.text, answer.judged, asked.params.logprobs)
    choice: dict[str, Any] = {
        "index": end.index,
        "message": message,
        "logprobs": judged,
        "finish_reason": _finish_reason(answer, end),
        "stop_reason": end.stop,
    }
    if want.body.return_token_ids:
        choice["token_ids"] = answer.tokens
    return choice
