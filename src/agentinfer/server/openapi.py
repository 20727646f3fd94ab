"""`GET /openapi.json`: the endpoints, made of the very records that bodies are read as."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentinfer import __version__
from agentinfer.loop import SamplingParams
from agentinfer.server.answer import json_response
from agentinfer.server.protocol import (
    SAMPLING,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from agentinfer.server.site import Site

_REF: Final = "#/components/schemas/{name}"
_POSTS: Final = (
    ("/v1/completions", CompletionBody, "Continue prompts.", True),
    ("/v1/chat/completions", ChatBody, "Answer a conversation.", True),
    ("/generate", GenerateBody, "Continue token ids.", False),
    ("/tokenize", TokenizeBody, "The token ids of a text, or of messages.", False),
    ("/detokenize", DetokenizeBody, "The text of token ids.", False),
)
"""(path, body, what it does, whether fields of SamplingParams are fields of the body)"""
_GETS: Final = (
    ("/health", "Whether the engine advances."),
    ("/v1/models", "The model, under each of its names."),
    ("/version", "Which program this is."),
    ("/load", "How busy the server is."),
    ("/metrics", "The numbers, for Prometheus."),
)
_STATUSES: Final = ("400", "401", "404", "408", "413", "415", "500", "503", "504")
_OF_TYPE: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("bool", {"type": "boolean"}),
    ("int |", {"type": ["integer", "null"]}),
    ("int", {"type": "integer"}),
    ("float", {"type": "number"}),
)


async def openapi(_site: Site, _request: Request) -> Response:
    """The document."""
    return json_response(_document())


@cache
def _document() -> Mapping[str, Any]:
    bodies = [body for _, body, _, _ in _POSTS]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    sampling = {name: _sampling(str(kind)) for name, kind in _kinds().items()}
    for _, body, _, samples in _POSTS:
        if samples:
            schemas[body.__name__]["properties"] |= {k: v for k, v in sampling.items() if k in SAMPLING}
    schemas["CompletionBody"]["properties"]["prompt"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ]
    }
    schemas["Error"] = _error_schema()
    paths: dict[str, Any] = {path: {"get": _operation(says)} for path, says in _GETS}
    for path, body, says, _ in _POSTS:
        reference = {"$ref": _REF.format(name=body.__name__)}
        content = {"content": {"application/json": {"schema": reference}}, "required": True}
        paths[path] = {"post": {**_operation(says), "requestBody": content}}
    info = {"title": "agentinfer", "version": __version__}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": key},
    }


def _kinds() -> dict[str, Any]:
    return {one.name: one.type for one in attrs.fields(SamplingParams)}


def _sampling(kind: str) -> dict[str, Any]:
    """What JSON a field of SamplingParams of this type is; {}: anything, and the server says what is wrong with it."""
    found: list[dict[str, Any]] = [dict(schema) for prefix, schema in _OF_TYPE if kind.startswith(prefix)]
    return found[0] if found else {}


def _operation(says: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    responses: dict[str, Any] = {status: {"description": "an error", "content": error} for status in _STATUSES}
    return {
        "summary": says,
        "responses": {"200": {"description": "the answer"}, **responses},
        "security": [{"key": []}],
    }


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"], "additionalProperties": False}
