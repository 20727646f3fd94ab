"""A small client of servers that speak OpenAI's API: one request, and the events of its answer as they come.

Knows HTTP/1.1 and server-sent events alone. It is here, and no library is, since a load generator must cost less than
what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from attrs import field, frozen

from agentinfer.errors import AgentInferError

_LIMIT = 16 << 20
"""Bytes of one line, and of an answer that is no stream."""


class Refused(AgentInferError, RuntimeError):
    """The server answered with another status than 200. `status` is that; 0: there was no answer."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


@frozen
class Remote:
    """A server."""

    url: str
    """Such as http://127.0.0.1:8000; a /v1 at its end is no part of it."""
    key: str | None = field(default=None, repr=False)


@contextlib.asynccontextmanager
async def asked(remote: Remote, method: str, path: str, body: bytes = b"") -> AsyncGenerator[AsyncIterator[bytes]]:
    """The lines of the answer's body, as they come; the connection ends with the block. Raises Refused, OSError."""
    parts = urlsplit(remote.url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_LIMIT)
    try:
        writer.write(_head(remote, method, parts.path.removesuffix("/").removesuffix("/v1") + path, parts.netloc, body))
        await writer.drain()
        try:
            status, headers = await _status(reader)
            lines = _lines(reader, headers)
            if status != 200:
                raise await _refused(status, headers, lines)
            yield lines
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            raise Refused(0, f"{remote.url}: no answer that can be read: {error!r}") from error
    finally:
        writer.close()


async def events(remote: Remote, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    """The data of each event of the answer, but for the last one, [DONE]. Raises Refused, OSError."""
    async with asked(remote, "POST", path, json.dumps(body).encode()) as lines:
        async for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                if data.startswith(b'{"error"'):
                    raise Refused(500, _message(data))
                yield data
        raise Refused(0, f"{remote.url}: the stream ended before its end")


async def get(remote: Remote, path: str) -> Any:
    """The JSON data at *path*. Raises Refused, OSError."""
    async with asked(remote, "GET", path) as lines:
        return json.loads(b"".join([line async for line in lines]))


def _head(remote: Remote, method: str, target: str, host: str, body: bytes) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", "Accept: text/event-stream, application/json"]
    if remote.key is not None:
        lines.append(f"Authorization: Bearer {remote.key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _status(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in rest)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _lines(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The lines of a body, whatever its pieces are."""
    held = b""
    async for piece in _pieces(reader, headers):
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if held:
        yield held


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            piece = await reader.readexactly(size + 2)
            yield piece[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def _refused(status: int, headers: Mapping[str, str], lines: AsyncIterator[bytes]) -> Refused:
    body = b"".join([line async for line in lines])
    after = headers.get("retry-after", "")
    return Refused(status, f"{status}: {_message(body)}", float(after) if after.isdecimal() else None)


def _message(body: bytes) -> str:
    """What an error object says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
