"""Errors as clients see them: an HTTP status, and one object {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from agentinfer.errors import InvalidRequest

INVALID: Final = "invalid_request_error"
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Problem(Exception):
    """What a client is told instead of an answer. *status* is only of use before the answer has begun."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,  # noqa: A002 - the API's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.headers = param, code, headers


def invalid(param: str | None, message: str) -> Problem:
    """A request that is wrong in its field *param*."""
    return Problem(400, message, param=param)


def of_invalid_request(error: InvalidRequest) -> Problem:
    """The engine's own words about a request that it refuses."""
    return Problem(400, str(error), param=error.field)


def renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """*problem*, whose field is called what the client calls it: *names*, by what the engine does."""
    param = problem.param or ""
    name = names.get(param.partition(".")[0], param)
    if param.partition(".")[0] == name.partition(".")[0]:
        return problem
    message = problem.message.replace(f"{param}:", f"{name}:", 1)
    return Problem(problem.status, message, problem.type, name, problem.code, problem.headers)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> Problem:
    """Not now: the same request may go well later, or elsewhere."""
    headers = NO_HEADERS if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Problem(503, message, "service_unavailable_error", code=code, headers=headers)


def engine_failed(message: str) -> Problem:
    """The engine failed at this very request."""
    return Problem(500, message, "server_error", code="engine_error")


def timed_out(seconds: float) -> Problem:
    """The request's own deadline has passed."""
    return Problem(504, f"not finished after {seconds:g} s", "timeout_error", code="timeout")


def object_of(problem: Problem) -> dict[str, Any]:
    """The JSON data of *problem*."""
    said = {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code}
    return {"error": said}


def bytes_of(problem: Problem) -> bytes:
    """The body of *problem*."""
    return msgspec.json.encode(object_of(problem))
