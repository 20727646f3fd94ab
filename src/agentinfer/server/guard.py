"""Who may ask what: keys. Around the whole application, so that a path that is forgotten is denied, not open."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable

from attrs import field, frozen
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentinfer.server.answer import problem_response
from agentinfer.server.problems import Problem
from agentinfer.server.site import tenant_of

_OPEN = "/health"
_ADMIN = "/admin/"


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


@frozen
class Keys:
    """The keys that open the server. Of one length each, so that comparing them tells nothing."""

    users: tuple[bytes, ...] = field(converter=_digests, repr=False)
    """SHA-256 of each; none at all: all may come."""
    admins: tuple[bytes, ...] = field(converter=_digests, repr=False)
    """None at all: nobody administers."""


def guarded(app: ASGIApp, keys: Keys, note: Callable[[int], None]) -> ASGIApp:
    """*app*, behind *keys*. The scope says whose request it is; *note* is told the status of who is denied."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given, path = _given(scope), scope["path"]
        problem = _problem(keys, path, given)
        if problem is not None:
            note(problem.status)
            await problem_response(problem)(scope, receive, send)
            return
        if keys.users and given is not None:
            scope["agentinfer.tenant"] = tenant_of(given)
        await app(scope, receive, send)

    return answer


def _problem(keys: Keys, path: str, given: str | None) -> Problem | None:
    if path == _OPEN:
        return None
    if path.startswith(_ADMIN):
        if not keys.admins:
            return Problem(403, "nobody administers this server: start it with --admin-key", code="no_admin_key")
        return None if _matches(keys.admins, given) else _denied(given)
    return None if not keys.users or _matches(keys.users, given) else _denied(given)


def _denied(given: str | None) -> Problem:
    said = "no API key was given" if given is None else "the API key is wrong"
    challenge = {"WWW-Authenticate": 'Bearer, Basic realm="agentinfer"'}
    return Problem(401, f"{said}: send Authorization: Bearer KEY", code="invalid_api_key", headers=challenge)


def _given(scope: Scope) -> str | None:
    """The key that came: a bearer token, or the password that a browser asked for."""
    kind, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


def _matches(digests: Iterable[bytes], given: str | None) -> bool:
    """Compares with all of them, and takes as long for each."""
    own = hashlib.sha256((given or "").encode("utf-8", "surrogatepass")).digest()
    found = [hmac.compare_digest(own, digest) for digest in digests]
    return given is not None and any(found)
