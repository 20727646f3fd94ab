"""Answers over ASGI: whole, or as server-sent events. Whoever reads one may leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentinfer.server.desk import Desk, Ticket, leave
from agentinfer.server.problems import Problem, bytes_of, renamed, timed_out
from agentinfer.server.site import Site

_log = logging.getLogger(__name__)
_DONE: Final = b"data: [DONE]\n\n"
_STREAM: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class _Gone(Exception):
    """The client has closed the connection."""


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """*data* as JSON."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


def problem_response(problem: Problem) -> Response:
    """*problem*, instead of an answer."""
    return Response(bytes_of(problem), problem.status, dict(problem.headers), "application/json")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def whole(site: Site, ticket: Ticket, make: Callable[[], Coroutine[Any, Any, Any]]) -> ASGIApp:
    """The answer to *ticket* that *make* makes, as one JSON object. *ticket* is left at the end, whatever happens."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with _leaving(site.desk, ticket):
            try:
                async with asyncio.timeout(site.quotas.request_timeout_s):
                    data = await _unless_gone(receive, make())
            except TimeoutError as error:
                raise timed_out(site.quotas.request_timeout_s) from error
            except _Gone:
                return
            await json_response(data, headers=ignored_header(scope))(scope, receive, send)

    return answer


def streamed(site: Site, ticket: Ticket, events: Callable[[], AsyncIterator[Any]]) -> ASGIApp:
    """The answer to *ticket* as server-sent events. What goes wrong on the way is one more event, before the end."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with _leaving(site.desk, ticket):
            extra = [(name.encode(), value.encode()) for name, value in (ignored_header(scope) or {}).items()]
            await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, *extra]})
            try:
                async with asyncio.timeout(site.quotas.request_timeout_s):
                    await _unless_gone(receive, _send_all(send, events()))
            except _Gone:
                return
            except Exception as error:  # noqa: BLE001 - the status is sent: it can be told as an event only
                with contextlib.suppress(TimeoutError):  # to whom does not read, nothing can be said
                    async with asyncio.timeout(1.0):
                        await _send(send, b"data: " + bytes_of(_as_problem(site, scope, error)) + b"\n\n" + _DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


def _as_problem(site: Site, scope: Scope, error: Exception) -> Problem:
    if isinstance(error, Problem):
        return renamed(error, scope.get("agentinfer.names", {}))
    if isinstance(error, TimeoutError):
        return timed_out(site.quotas.request_timeout_s)
    _log.error("an answer failed", exc_info=error)
    return Problem(500, "internal error", "server_error", code="internal_error")


async def _send_all(send: Send, events: AsyncIterator[Any]) -> None:
    async for data in events:
        await _send(send, event(data))
    await _send(send, _DONE)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


@contextlib.contextmanager
def _leaving(desk: Desk, ticket: Ticket) -> Generator[None]:
    try:
        yield
    finally:
        leave(desk, ticket)


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What *work* gives. It is cancelled when the client goes: raises _Gone."""
    doing, going = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, going), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise _Gone
    finally:
        for task in (doing, going):
            task.cancel()
        await asyncio.gather(doing, going, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def ignored_header(scope: Scope) -> dict[str, str] | None:
    """Tells a client which of its fields had no effect; percent-encoded, for a name may be any text."""
    names = [quote(name[:64]) for name in scope.get("agentinfer.ignored", ())[:16] if name]
    return {"X-Ignored-Fields": ", ".join(names)} if names else None
