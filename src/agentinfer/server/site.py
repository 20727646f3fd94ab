"""What every endpoint knows, and what they have in common: reading a body, making sequences of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
from attrs import evolve, field, frozen
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from agentinfer.errors import InvalidRequest
from agentinfer.loop import SamplingParams
from agentinfer.parsers import Format
from agentinfer.server.desk import Desk, Ticket, check_open, submit
from agentinfer.server.mail import Item
from agentinfer.server.problems import Problem, invalid, of_invalid_request, unavailable
from agentinfer.server.protocol import SAMPLING, Body, StreamOptions, names_of, read_body, read_json, unknown_fields
from agentinfer.text import Text

_log = logging.getLogger(__name__)
_MOST_WARNED: Final = 1000
Found = TypeVar("Found")


@frozen
class Quotas:
    """What one request may ask for. The defaults are those of the command line."""

    max_body: int = 8 << 20
    """Bytes."""
    max_output_tokens: int | None = None
    """None: to the end of max_model_len."""
    max_n: int = 128
    max_logprobs: int = 20
    max_stop: int = 16
    """Stop strings."""
    request_timeout_s: float = 3600.0
    """From the end of its body to the end of its answer."""
    body_timeout_s: float = 30.0
    """To receive a body."""


@frozen(eq=False)
class Site:
    """All that endpoints know."""

    desk: Desk
    text: Text | None
    names: tuple[str, ...]
    """What clients may call the model; the first one is what answers call it."""
    created: int
    """Seconds since 1970."""
    max_model_len: int
    quotas: Quotas
    form: Format | None
    """How the model writes reasoning and tool calls; None: neither is looked for."""
    pool: Executor
    """Where prompts become tokens."""
    form_slots: asyncio.Semaphore
    """One for each request whose grammar may be compiled, or wait for it."""
    max_stall_s: float
    """A step that takes longer is a hang."""
    ui: bool = True
    """There is a status page."""
    trace: Path | None = None
    """Where the engine is recorded, if it is."""
    farewell: Callable[[Headers], Callable[[Ticket], None]] | None = None
    """Makes of a request's headers what is to be called when it leaves; None: nothing is."""
    warned: set[str] = field(factory=set[str])
    """Names of fields that a warning was logged for."""


@frozen(eq=False)
class Asked:
    """A request that is being answered."""

    site: Site
    ticket: Ticket
    head: dict[str, Any]
    """What an answer, and every chunk of a stream, begins with."""
    params: SamplingParams
    options: StreamOptions


async def read(site: Site, request: Request, kind: type[Body], also: frozenset[str] = SAMPLING) -> tuple[Any, Body]:
    """The body of *request*: as it is, and as a *kind*. Raises Problem."""
    check_open(site.desk)
    form = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if form != "application/json":
        raise Problem(415, f"the body must be application/json, not {form}")
    raw = read_json(await bytes_of(site.quotas, request))
    ignored = unknown_fields(raw, kind, also)
    body = read_body(raw, kind)
    request.scope["agentinfer.names"] = names_of(raw, kind)
    _check_model(site, raw.get("model"))
    if ignored:
        _warn(site, ignored)
        request.scope["agentinfer.ignored"] = ignored
    return raw, body


async def bytes_of(quotas: Quotas, request: Request) -> bytes:
    """The body of *request*. Raises Problem for one that is too large or too slow."""
    too_large = Problem(413, f"the body is larger than {quotas.max_body} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > quotas.max_body:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(quotas.body_timeout_s):
            async for piece in request.stream():
                data += piece
                if len(data) > quotas.max_body:
                    raise too_large
    except TimeoutError as error:
        raise Problem(408, f"the body did not come within {quotas.body_timeout_s:g} s", code="timeout") from error
    except ClientDisconnect as error:
        raise Problem(499, "the client has gone") from error
    return bytes(data)


def _check_model(site: Site, name: object) -> None:
    if name is not None and name not in site.names:
        raise Problem(404, f"the model {name!r} does not exist", param="model", code="model_not_found")


def _warn(site: Site, names: Sequence[str]) -> None:
    new = [name for name in names if name not in site.warned]
    if new and len(site.warned) < _MOST_WARNED:
        site.warned.update(new)
        _log.warning("fields that are ignored in requests: %s", ", ".join(quote(name[:64]) for name in new))


async def in_pool(site: Site, work: Callable[[], Found]) -> Found:
    """*work*, done by another thread: the event loop goes on. Raises Problem for what the engine calls invalid."""
    try:
        return await asyncio.get_running_loop().run_in_executor(site.pool, work)
    except InvalidRequest as error:
        raise of_invalid_request(error) from error


async def enter(site: Site, request: Request, name: str, items: Sequence[Item]) -> Ticket:
    """Give *items*, all of one form, to the engine: see `submit`. Raises Problem."""
    if items[0].params.structured_outputs is None:
        ticket = await submit(site.desk, name, items)
    elif site.form_slots.locked():
        raise unavailable("too many grammars wait to be compiled", "overloaded", 1)
    else:
        async with site.form_slots:
            ticket = await submit(site.desk, name, items)
    if site.farewell is not None:
        ticket.farewell = site.farewell(request.headers)
    return ticket


def check_quotas(site: Site, params: SamplingParams) -> None:
    """Raises Problem for what this server does not let one request ask."""
    quotas = site.quotas
    for name, value, most in (
        ("max_tokens", params.max_tokens, quotas.max_output_tokens),
        ("n", params.n, quotas.max_n),
        ("logprobs", params.logprobs, quotas.max_logprobs),
        ("prompt_logprobs", params.prompt_logprobs, quotas.max_logprobs),
        ("stop", len(params.stop), quotas.max_stop),
    ):
        if value is not None and most is not None and value > most:
            raise invalid(name, f"{name}: {value} is more than this server allows, {most}")


def items_of(
    site: Site, prompts: Sequence[tuple[int, ...]], params: SamplingParams, salt: str | None, default: int | None = None
) -> list[Item]:
    """An item a prompt. *default*: max_tokens where none is asked. Raises Problem."""
    check_quotas(site, params)
    most = [n for n in (default, site.quotas.max_output_tokens) if n is not None]
    items: list[Item] = []
    for prompt in prompts:
        _check_ids(prompt)
        asked = params
        if params.max_tokens is None and most:
            room = max(1, site.max_model_len - len(prompt))
            asked = evolve(params, max_tokens=max(1, params.min_tokens, min(*most, room)))
        items.append(Item(prompt, asked, salt))
    return items


def _check_ids(prompt: Sequence[int]) -> None:
    """Raises Problem for numbers that no engine calls token ids: some are too large for the mail."""
    if prompt and not 0 <= min(prompt) <= max(prompt) < 2**31:
        index = next(i for i, token in enumerate(prompt) if not 0 <= token < 2**31)
        raise invalid("prompt", f"prompt: item {index} is no token id: {prompt[index]}")


def salt_of(scope: Mapping[str, Any], given: str | None) -> str | None:
    """The prefix cache's domain: that of the client's key, and in it the one that the request names."""
    tenant = scope.get("agentinfer.tenant")
    return None if tenant is None and given is None else msgspec.json.encode([tenant, given]).decode()


def tenant_of(key: str) -> str:
    """Names the holder of *key* without telling it."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def new_name(prefix: str, request: Request, given: str | None = None) -> str:
    """What an answer is called: after the request's own id, if it has one."""
    asked = given or request.headers.get("x-request-id")
    return f"{prefix}-{asked if asked is not None and len(asked) <= 256 else secrets.token_hex(16)}"
