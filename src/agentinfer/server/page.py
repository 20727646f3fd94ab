"""The status page at `/`: one file, that asks the endpoints that everybody has."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from agentinfer.server.site import Site

_PARTS: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and a policy under which a browser runs nothing but what is in it."""
    page = resources.files("agentinfer.server").joinpath("page.html").read_bytes()
    hashes = {kind: base64.b64encode(hashlib.sha256(inner).digest()).decode() for kind, inner in _PARTS.findall(page)}
    own = f"script-src 'sha256-{hashes[b'script']}'; style-src 'sha256-{hashes[b'style']}'"
    return page, f"default-src 'none'; connect-src 'self'; {own}; frame-ancestors 'none'; base-uri 'none'"


async def page(_site: Site, _request: Request) -> Response:
    """How busy the server is, and a box for a prompt."""
    body, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")
