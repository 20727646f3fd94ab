"""The application: which path is whose, and every error in the shape of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from agentinfer.server import chat, completions, openapi, page, plain, tokens
from agentinfer.server.answer import problem_response
from agentinfer.server.guard import Keys, guarded
from agentinfer.server.metrics import note_refusal
from agentinfer.server.problems import Problem, renamed
from agentinfer.server.site import Site

Endpoint = Callable[[Site, Request], Awaitable[ASGIApp]]


def make_app(site: Site, keys: Keys) -> ASGIApp:
    """All of the server over ASGI."""
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        Problem: partial(_problem, site),
        HTTPException: partial(_http_error, site),
        Exception: partial(_error, site),
    }
    app = Starlette(routes=_routes(site), exception_handlers=handlers)
    return guarded(app, keys, partial(note_refusal, site.desk.metrics))


def _routes(site: Site) -> list[BaseRoute]:
    def route(method: str, path: str, endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Any:
            return await endpoint(site, request)

        return Route(path, answer, methods=[method])

    return [
        *([route("GET", "/", page.page)] if site.ui else []),
        route("GET", "/health", plain.health),
        route("GET", "/version", plain.version),
        route("GET", "/openapi.json", openapi.openapi),
        route("GET", "/load", plain.load),
        route("GET", "/metrics", plain.metrics),
        route("GET", "/v1/models", plain.models),
        route("GET", "/v1/models/{name:path}", plain.model),
        route("POST", "/v1/completions", completions.completions),
        route("POST", "/v1/chat/completions", chat.completions),
        route("POST", "/tokenize", tokens.tokenize),
        route("POST", "/detokenize", tokens.detokenize),
        route("POST", "/generate", tokens.generate),
        route("POST", "/admin/pause", plain.pause_engine),
        route("POST", "/admin/resume", plain.resume_engine),
        route("POST", "/admin/abort", plain.abort),
        route("GET", "/admin/state", plain.state),
        route("GET", "/admin/trace", plain.trace),
    ]


async def _problem(site: Site, request: Request, problem: Problem) -> Response:
    note_refusal(site.desk.metrics, problem.status)
    return problem_response(renamed(problem, request.scope.get("agentinfer.names", {})))


async def _http_error(site: Site, request: Request, error: HTTPException) -> Response:
    """What the framework refuses: an unknown path, a method that a path has not."""
    where = f"{request.method} {request.url.path}"
    said = {404: f"{where}: no such path", 405: f"{where}: the path has no such method"}
    message = said.get(error.status_code, str(error.detail))
    return await _problem(site, request, Problem(error.status_code, message, headers=error.headers or {}))


async def _error(site: Site, request: Request, _error: Exception) -> Response:
    """A fault of the server: the log has it, the client gets no part of it."""
    return await _problem(site, request, Problem(500, "internal error", "server_error", code="internal_error"))
